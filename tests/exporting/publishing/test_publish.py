"""A model repository: which files each server finds, that earlier versions stay, and what happens where it fails."""

import errno
import json
import shutil
from dataclasses import replace

import keras
import numpy as np
import pytest
import tensorflow as tf
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format
from keras import layers
from tensorflow_serving.apis import predict_pb2, prediction_log_pb2

from tfopt.atomic.checked_json import with_checksum
from tfopt.atomic.directories import exclusive
from tfopt.cli import main
from tfopt.errors import ArtifactError, ConfigError, ExportError
from tfopt.exporting import ExportConfig, export, publish, verify
from tfopt.exporting.manifest import SignatureRecord, TensorRecord, read_intact_manifest, read_manifest
from tfopt.exporting.publishing import triton
from tfopt.report import ServingTimes, ThreadTimes

X = np.random.default_rng(0).random((8, 6, 6, 3), dtype="float32")


def times(speedup):
    calls = [ThreadTimes(batch_size=size, threads=(1, 4), latency_ms_median=(5, 4), best_threads=4) for size in (1, 16)]
    return ServingTimes(
        device="a processor",
        cores=4,
        calls=tuple(calls),
        parallel_calls=4,
        parallel_threads=1,
        parallel_examples_per_s=100 * speedup,
        batch_examples_per_s=100.0,
        parallel_speedup=speedup,
        parallel_speedup_range=(speedup * 0.99, speedup * 1.01),
    )


def with_times(artifact, target, speedup):
    """Copies an artifact, with measured times in its manifest."""
    shutil.copytree(artifact, target)
    manifest = replace(read_manifest(target), serving=times(speedup))
    (target / "manifest.json").write_text(json.dumps(with_checksum(manifest.to_dict())))
    return target


@pytest.fixture(scope="module")
def model():
    keras.utils.set_random_seed(0)
    inputs = keras.Input((6, 6, 3), name="image")
    x = layers.Flatten()(layers.Conv2D(4, 3, activation="relu")(inputs))
    return keras.Model(inputs, {"classes": layers.Dense(5, activation="softmax")(x), "sum": layers.Dense(1)(x)})


@pytest.fixture(scope="module")
def artifacts(model, tmp_path_factory):
    root = tmp_path_factory.mktemp("artifacts")
    export(model, root / "float32", ExportConfig(xla_signature=True))
    config = ExportConfig(precision="int8", int8_nodes="all", float_fallback=True)
    export(model, root / "int8", config, calibration_data=X, baseline=root / "float32")
    export(model, root / "onnx", ExportConfig(format="onnx"))
    return root


def files_below(directory):
    return {
        path.relative_to(directory).as_posix(): path.read_bytes() for path in directory.rglob("*") if path.is_file()
    }


def requests_of(version):
    records = tf.data.TFRecordDataset(str(version / "assets.extra" / "tf_serving_warmup_requests"))
    return [prediction_log_pb2.PredictionLog.FromString(each.numpy()).predict_log.request for each in records]


def answer(version, request):
    """Does what TensorFlow Serving does with a PredictRequest: messages in, TensorFlow's own reading, messages out."""
    loaded = tf.saved_model.load(str(version))
    serve = loaded.signatures[request.model_spec.signature_name or "serving_default"]
    given = {name: tf.io.parse_tensor(each.SerializeToString(), each.dtype) for name, each in request.inputs.items()}
    response = predict_pb2.PredictResponse()
    for name, value in serve(**given).items():
        response.outputs[name].CopyFrom(tf.make_tensor_proto(value))
    return predict_pb2.PredictResponse.FromString(response.SerializeToString())


def test_a_version_is_the_artifact_under_a_number_and_can_be_verified(artifacts, tmp_path):
    first = publish(artifacts / "int8", tmp_path / "repository", name="mine")
    assert (first.path, first.version) == (str(tmp_path / "repository" / "mine" / "1"), 1)
    own, copied = files_below(artifacts / "int8"), files_below(tmp_path / "repository" / "mine" / "1")
    assert copied.keys() - own.keys() == {"assets.extra/tf_serving_warmup_requests"}
    assert all(copied[name] == content for name, content in own.items() if name != "manifest.json")
    assert {"saved_model.pb", "variables/variables.index"} <= copied.keys()
    receipt = verify(first.path, seconds=0)
    assert receipt.ok
    assert receipt.baseline is not None  # the manifest's path to it is relative
    second = publish(artifacts / "int8", tmp_path / "repository", name="mine")
    assert second.version == 2
    assert files_below(tmp_path / "repository" / "mine" / "1") == copied


def test_a_version_is_published_into_another_repository(artifacts, tmp_path):
    publish(with_times(artifacts / "float32", tmp_path / "timed", 0.5), tmp_path / "staging", name="mine")
    again = publish(tmp_path / "staging" / "mine" / "1", tmp_path / "production", batch_sizes=(2,))
    assert again.path == str(tmp_path / "production" / "mine" / "1")
    shapes = {tf.make_ndarray(each.inputs["image"]).shape for each in requests_of(tmp_path / "production/mine/1")}
    assert shapes == {(2, 6, 6, 3)}
    bare = publish(tmp_path / "staging" / "mine" / "1", tmp_path / "bare", warm_up=False)
    assert not (tmp_path / "bare" / "mine" / "1" / "assets.extra").exists()
    read_intact_manifest(tmp_path / "bare" / "mine" / "1")
    assert [each.name for each in bare.report.changed] == ["mine/1", "batching_params.pbtxt"]


def test_an_earlier_version_is_never_overwritten(artifacts, tmp_path):
    publish(artifacts / "float32", tmp_path, version=7)
    before = files_below(tmp_path)
    with pytest.raises(ConfigError, match=r"version must be new.*version=7.*Leave version out for 8"):
        publish(artifacts / "float32", tmp_path, version=7)
    assert files_below(tmp_path) == before
    assert publish(artifacts / "float32", tmp_path, version=3).version == 3
    assert publish(artifacts / "float32", tmp_path).version == 8


def test_a_version_with_leading_zeros_counts_as_servers_read_it(artifacts, tmp_path):
    for number in ("00000123", "0", "9223372036854775808", "12a"):
        (tmp_path / "mine" / number).mkdir(parents=True)
    assert publish(artifacts / "onnx", tmp_path, name="mine").version == 124
    with pytest.raises(ConfigError, match=r"version must be new.*mine/00000123 exists"):
        publish(artifacts / "onnx", tmp_path, name="mine", version=123)
    (tmp_path / "mine" / "124").rename(tmp_path / "mine" / "0124")
    with pytest.raises(ConfigError, match=r"All versions of a served model.*mine/0124 is onnx"):
        publish(artifacts / "float32", tmp_path, name="mine")


def test_a_version_fits_64_bits(artifacts, tmp_path):
    with pytest.raises(ConfigError, match=r"version must be.*Received: version=9223372036854775808"):
        publish(artifacts / "onnx", tmp_path, version=2**63)
    publish(artifacts / "onnx", tmp_path, version=2**63 - 1)
    with pytest.raises(ConfigError, match=r"version must be.*Received: version=9223372036854775808"):
        publish(artifacts / "onnx", tmp_path)


def test_warm_up_requests_are_messages_that_the_model_answers(artifacts, tmp_path):
    version = tmp_path / "mine" / "1"
    publish(artifacts / "float32", tmp_path, name="mine", batch_sizes=(3, 1))
    requests = requests_of(version)
    kinds = [(each.model_spec.signature_name, tf.make_ndarray(each.inputs["image"]).shape) for each in requests]
    shapes = [(1, 6, 6, 3), (3, 6, 6, 3)]
    assert kinds == [(name, shape) for name in ("serving_default", "serving_xla") for shape in shapes]
    assert {each.model_spec.name for each in requests} == {"mine"}
    assert all(each.ByteSize() < 100 for each in requests)
    for request in requests[:2]:
        assert answer(version, request).outputs["sum"].tensor_shape.dim[0].size in (1, 3)


def test_a_request_and_its_response_are_the_outputs_of_the_model(model, artifacts, tmp_path):
    published = publish(artifacts / "float32", tmp_path, warm_up=False)
    request = predict_pb2.PredictRequest()
    request.model_spec.name, request.model_spec.version.value = published.name, published.version
    request.inputs["image"].CopyFrom(tf.make_tensor_proto(X))
    response = answer(tmp_path / "float32" / "1", predict_pb2.PredictRequest.FromString(request.SerializeToString()))
    for name, expected in model.predict(X, verbose=0).items():
        np.testing.assert_allclose(tf.make_ndarray(response.outputs[name]), expected, rtol=1e-5, atol=1e-6)


def test_words_and_numbers_of_other_types_are_warmed_up_too(tmp_path):
    word, ids = keras.Input((2,), dtype="string", name="word"), keras.Input((None,), dtype="int32", name="ids")
    number = layers.StringLookup(vocabulary=["red", "green"])(word)
    joined = layers.Concatenate()(
        [layers.Flatten()(layers.Embedding(4, 3)(number)), layers.GlobalAveragePooling1D()(layers.Embedding(7, 3)(ids))]
    )
    export(keras.Model([word, ids], layers.Dense(2)(joined)), tmp_path / "words")
    publish(tmp_path / "words", tmp_path / "repository")
    for request, size in zip(requests_of(tmp_path / "repository" / "words" / "1"), (1, 8), strict=True):
        assert set(tf.make_ndarray(request.inputs["word"]).reshape(-1)) <= {b"red", b"green"}
        response = answer(tmp_path / "repository" / "words" / "1", request)
        assert tf.make_ndarray(response.outputs["output_0"]).shape == (size, 2)


def test_a_version_of_somebody_else_is_left(artifacts, tmp_path):
    (tmp_path / "repository" / "mine" / "1").mkdir(parents=True)
    (tmp_path / "repository" / "mine" / "1" / "saved_model.pb").write_bytes(b"of somebody else")
    assert publish(artifacts / "float32", tmp_path / "repository", name="mine").version == 2


def test_a_version_that_takes_fewer_sizes_is_refused(tmp_path):
    for version, shape in enumerate(((None, 4), (8, 4)), start=1):
        network = [keras.Input(shape, name="steps"), layers.GlobalAveragePooling1D(), layers.Dense(2)]
        export(keras.Sequential(network), tmp_path / str(version))
    publish(tmp_path / "1", tmp_path / "repository", name="mine")
    with pytest.raises(ConfigError, match=r"All versions of a served model.*\[None, 8, 4\].*\[None, None, 4\]"):
        publish(tmp_path / "2", tmp_path / "repository", name="mine")


def test_an_artifact_of_an_earlier_manifest_is_published_in_the_present_format(artifacts, tmp_path):
    shutil.copytree(artifacts / "float32", tmp_path / "old")
    content = read_manifest(tmp_path / "old").to_dict()
    check = content["check"]
    outputs = {kind: {name: each["values"] for name, each in of.items()} for kind, of in check["outputs"].items()}
    content |= {"format": 1, "check": {"ranges": check["ranges"], "shapes": check["shapes"], **outputs}}
    (tmp_path / "old" / "manifest.json").write_text(json.dumps(with_checksum(content)))
    published = publish(tmp_path / "old", tmp_path / "repository", name="mine")
    assert read_manifest(tmp_path / published.path).format == 2
    assert publish(tmp_path / "old", tmp_path / "repository", name="mine").version == 2


def test_a_fixed_batch_size_is_kept(tmp_path):
    serve = tf.function(lambda x: {"y": 2 * x}, input_signature=[tf.TensorSpec([4, 3], tf.float32, "x")])
    tf.saved_model.save(tf.Module(), str(tmp_path / "source"), signatures=serve.get_concrete_function())
    export(tmp_path / "source", tmp_path / "fixed")
    published = publish(tmp_path / "fixed", tmp_path / "repository")
    (request,) = requests_of(tmp_path / "repository" / "fixed" / "1")
    assert tf.make_ndarray(request.inputs["x"]).shape == (4, 3)
    assert [each.reason for each in published.report.skipped] == ["the batch size is fixed"]


def test_batches_are_set_where_they_were_measured_to_pay(artifacts, tmp_path):
    pays = publish(with_times(artifacts / "float32", tmp_path / "pays", 0.5), tmp_path / "repository", warm_up=False)
    text = (tmp_path / "repository" / "pays" / "1" / "batching_params.pbtxt").read_text()
    assert text == "max_batch_size { value: 16 }\nnum_batch_threads { value: 1 }\nbatch_timeout_micros { value: 0 }\n"
    assert not pays.report.skipped
    read_intact_manifest(tmp_path / "repository" / "pays" / "1")
    single = publish(with_times(artifacts / "float32", tmp_path / "not", 2), tmp_path / "repository", warm_up=False)
    unknown = publish(artifacts / "float32", tmp_path / "repository", warm_up=False)
    for published, reason in ((single, "calls at the same time"), (unknown, "no times were measured")):
        (skip,) = published.report.skipped
        assert skip.name == "batching_params.pbtxt"
        assert reason in skip.reason


FIELD = descriptor_pb2.FieldDescriptorProto
TYPES = ("TYPE_FP32", "TYPE_INT32", "TYPE_STRING")
# The part of Triton's model_config.proto that tfopt writes: messages with their fields, by Triton's numbers.
PROTO = {
    "Shape": [("shape", 1, "int64", True)],
    "Tensor": [("name", 1, "string"), ("data_type", 2, "Type"), ("dims", 4, "int64", True), ("reshape", 5, "Shape")],
    "Instances": [("name", 1, "string"), ("kind", 4, "Kind"), ("count", 2, "int32")],
    "Batching": [("max_queue_delay_microseconds", 2, "int64")],
    "Text": [("string_value", 1, "string")],
    "Parameter": [("key", 1, "string"), ("value", 2, "Text")],
    "Given": [("data_type", 1, "Type"), ("dims", 2, "int64", True), ("zero_data", 3, "bool")],
    "Input": [("key", 1, "string"), ("value", 2, "Given")],
    "WarmUp": [("name", 1, "string"), ("batch_size", 2, "int32"), ("inputs", 3, "Input", True)],
    "Config": [
        ("name", 1, "string"),
        ("backend", 17, "string"),
        ("max_batch_size", 4, "int32"),
        ("input", 5, "Tensor", True),
        ("output", 6, "Tensor", True),
        ("instance_group", 7, "Instances", True),
        ("dynamic_batching", 11, "Batching"),
        ("parameters", 14, "Parameter", True),
        ("model_warmup", 16, "WarmUp", True),
    ],
}


@pytest.fixture(scope="module")
def parse():
    """Reads a config.pbtxt as protobuf does."""
    file = descriptor_pb2.FileDescriptorProto(name="triton_part.proto", package="triton_part", syntax="proto3")
    for name, values in (("Type", ("TYPE_INVALID", *TYPES)), ("Kind", ("KIND_AUTO", "KIND_GPU", "KIND_CPU"))):
        enum = file.enum_type.add(name=name)
        for number, value in enumerate(values):
            enum.value.add(name=value, number=number)
    for message, fields in PROTO.items():
        made = file.message_type.add(name=message)
        for name, number, kind, *repeated in fields:
            field = made.field.add(name=name, number=number)
            field.label = FIELD.LABEL_REPEATED if repeated else FIELD.LABEL_OPTIONAL
            plain = getattr(FIELD, f"TYPE_{kind.upper()}", None)
            field.type = plain or (FIELD.TYPE_ENUM if kind in ("Type", "Kind") else FIELD.TYPE_MESSAGE)
            if not plain:
                field.type_name = f".triton_part.{kind}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    config = message_factory.GetMessageClass(pool.FindMessageTypeByName("triton_part.Config"))
    return lambda text: text_format.Parse(text, config())


def test_triton_is_told_of_inputs_outputs_batches_and_threads(artifacts, tmp_path, parse):
    published = publish(with_times(artifacts / "onnx", tmp_path / "onnx", 2), tmp_path / "repository", name="mine")
    assert files_below(tmp_path / "repository").keys() == {
        "mine/config.pbtxt", "mine/1/model.onnx", "mine/1/manifest.json",
    }  # fmt: skip
    assert [each.name for each in published.report.changed] == ["mine/1", "config.pbtxt"]
    config = parse((tmp_path / "repository" / "mine" / "config.pbtxt").read_text())
    assert (config.name, config.backend, config.max_batch_size) == ("mine", "onnxruntime", 8)
    (image,) = config.input
    assert (image.name, TYPES[image.data_type - 1], list(image.dims)) == ("image", "TYPE_FP32", [6, 6, 3])
    assert {each.name: list(each.dims) for each in config.output} == {"classes": [5], "sum": [1]}
    assert config.HasField("dynamic_batching")
    assert [(each.count, each.kind) for each in config.instance_group] == [(4, 2)]
    assert {each.key: each.value.string_value for each in config.parameters} == {"intra_op_thread_count": "1"}
    calls = [(each.batch_size, list(each.inputs[0].value.dims)) for each in config.model_warmup]
    assert calls == [(1, [6, 6, 3]), (8, [6, 6, 3])]


def test_a_config_of_triton_that_somebody_has_tuned_stays(artifacts, tmp_path):
    publish(artifacts / "onnx", tmp_path)
    (tmp_path / "onnx" / "config.pbtxt").write_text("# mine\n")
    again = publish(artifacts / "onnx", tmp_path)
    assert (tmp_path / "onnx" / "config.pbtxt").read_text() == "# mine\n"
    assert [(each.name, each.reason) for each in again.report.skipped] == [
        ("config.pbtxt", "there is one already, which stays as it is")
    ]


def test_a_fixed_batch_an_open_size_and_a_single_value_in_config(artifacts, parse):
    manifest = read_manifest(artifacts / "onnx")

    def config_of(inputs, outputs, shapes):
        specs = [
            {name: TensorRecord(shape=shape, dtype=dtype) for name, (shape, dtype) in each.items()}
            for each in (inputs, outputs)
        ]
        check = replace(manifest.check, shapes=shapes)
        changed = replace(manifest, signature=SignatureRecord(inputs=specs[0], outputs=specs[1]), check=check)
        return parse(triton.config("mine", changed, (1, 8), 8))

    config = config_of(
        {"ids": ((None, None), "int32"), "weight": ((None,), "float32")},
        {"y": ((None,), "float32")},
        {"ids": (2, 9), "weight": (2,)},
    )
    assert config.max_batch_size == 8
    assert [(list(each.dims), each.HasField("reshape")) for each in config.input] == [([-1], False), ([1], True)]
    assert [list(each.value.dims) for each in config.model_warmup[0].inputs] == [[9], [1]]
    fixed = config_of({"x": ((4, 3), "float32")}, {"y": ((4, None), "string")}, {"x": (4, 3)})
    assert (fixed.max_batch_size, fixed.HasField("dynamic_batching")) == (0, False)
    assert [list(each.dims) for each in (*fixed.input, *fixed.output)] == [[4, 3], [4, -1]]
    assert [(each.batch_size, list(each.inputs[0].value.dims)) for each in fixed.model_warmup] == [(1, [4, 3])]
    alone = config_of({"x": ((None, 3), "float32")}, {"y": ((2,), "float32")}, {"x": (4, 3)})
    assert [(each.name, list(each.inputs[0].value.dims)) for each in alone.model_warmup] == [
        ("1 example", [1, 3]), ("8 examples", [8, 3]),
    ]  # fmt: skip
    evil = 'x" dims: [1] } ] model_operations { op_library_filename: "/evil.so" } input [ { name: "y'
    quoted = config_of({evil: ((None, 3), "float32")}, {'say "hi"': ((None, 1), "float32")}, {evil: (2, 3)})
    assert ([each.name for each in quoted.input], quoted.output[0].name) == ([evil], 'say "hi"')


def test_triton_gets_no_config_that_it_cannot_serve(artifacts, tmp_path):
    manifest = read_manifest(artifacts / "onnx")
    inputs = {"x": TensorRecord(shape=(4, 3), dtype="float32")}
    for name, shape, reason in (("sum", (), "has no axes"), ("all", None, "the number of axes of 'all' is open")):
        outputs = {name: TensorRecord(shape=shape, dtype="float32")}
        given = replace(manifest, signature=SignatureRecord(inputs=inputs, outputs=outputs))
        (skip,) = triton.write(tmp_path, given, (1, 8), warm_up=True)
        assert reason in skip.reason
    # Triton's backend for OpenVINO answers batches of max_batch_size only.
    assert not list(triton.write(tmp_path, replace(manifest, model_format="openvino"), (1, 8), warm_up=True))
    assert not files_below(tmp_path)


def test_all_versions_take_and_give_the_same(artifacts, tmp_path):
    other = keras.Sequential([keras.Input((6, 6, 1), name="image"), layers.Flatten(), layers.Dense(5)])
    export(other, tmp_path / "other")
    publish(artifacts / "float32", tmp_path / "repository", name="mine")
    before = files_below(tmp_path / "repository")
    publish_other = (tmp_path / "other", r"\[None, 6, 6, 1\].*mine/1 is saved_model"), (artifacts / "onnx", "onnx,")
    for artifact, words in publish_other:
        with pytest.raises(ConfigError, match=rf"All versions of a served model.*{words}.*Pass another name"):
            publish(artifact, tmp_path / "repository", name="mine")
    assert files_below(tmp_path / "repository") == before
    publish(artifacts / "int8", tmp_path / "repository", name="mine")  # the precision may change


@pytest.mark.parametrize("name", ["", "a/b", "..", ".hidden", "a b", "ä", 3])
def test_a_name_is_part_of_paths_and_urls(name, artifacts, tmp_path):
    with pytest.raises(ConfigError, match=r"name must be made of.*Received: name="):
        publish(artifacts / "float32", tmp_path, name=name)


def test_a_full_disk_leaves_nothing(artifacts, tmp_path, monkeypatch):
    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("tfopt.exporting.publishing.publish.shutil.copyfile", full)
    with pytest.raises(ExportError, match="Make room"):
        publish(artifacts / "float32", tmp_path / "repository")
    assert not files_below(tmp_path / "repository")
    assert not (tmp_path / "repository" / "float32").exists()


def test_a_damaged_artifact_is_refused(artifacts, tmp_path, capsys):
    damaged = shutil.copytree(artifacts / "onnx", tmp_path / "damaged")
    content = bytearray((damaged / "model.onnx").read_bytes())
    content[len(content) // 2] ^= 1
    (damaged / "model.onnx").write_bytes(content)
    with pytest.raises(ArtifactError, match="has changed"):
        publish(damaged, tmp_path / "repository")
    assert main(["publish", str(damaged), str(tmp_path / "repository")]) == 1
    assert main(["publish", str(tmp_path / "nowhere"), str(tmp_path / "repository")]) == 2
    assert "has changed" in capsys.readouterr().err
    assert not (tmp_path / "repository").exists()


def test_a_repository_in_an_artifact_and_two_at_once_are_refused(artifacts, tmp_path):
    inner = shutil.copytree(artifacts / "onnx", tmp_path / "onnx")
    before = files_below(inner)
    for directory in (inner, tmp_path):  # the second is the artifact itself as the served model
        with pytest.raises(ExportError, match="must not lie inside an artifact"):
            publish(inner, directory)
    assert files_below(inner) == before
    with exclusive(tmp_path / "repository" / "onnx"), pytest.raises(ExportError, match="One run at a time"):
        publish(artifacts / "onnx", tmp_path / "repository")


def test_without_the_messages_of_tensorflow_serving(artifacts, tmp_path, monkeypatch):
    monkeypatch.setattr("tfopt.exporting.publishing.tensorflow_serving.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"tensorflow-serving-api.*pip install 'tfopt\[serving\]'.*warm_up=False"):
        publish(artifacts / "float32", tmp_path / "repository")
    assert publish(artifacts / "float32", tmp_path / "repository", warm_up=False).version == 1
    publish(artifacts / "onnx", tmp_path / "repository")  # it needs none


def test_the_command(artifacts, tmp_path, capsys):
    words = ["publish", str(artifacts / "onnx"), str(tmp_path / "repository"), "--name", "mine"]
    assert main([*words, "--batch-sizes", "1", "4"]) == 0
    said = capsys.readouterr().out
    assert "changed  config.pbtxt (Triton): joins requests to batches of up to 4" in said
    assert said.endswith(f"published {tmp_path / 'repository' / 'mine' / '1'}\n")
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["version"] == 2
    assert main([*words, "--version", "2"]) == 2
    assert "version must be new" in capsys.readouterr().err
