"""Models that reach files, the network or Python: refused before anything runs, and listed completely."""

import re
import shutil
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.core.framework.op_def_pb2 import OpList
from tensorflow.core.protobuf.saved_model_pb2 import SavedModel
from tensorflow.python.client import pywrap_tf_session

from tfopt.cli.entry import main
from tfopt.errors import ArtifactError, UnsupportedModelError
from tfopt.exporting import ExportConfig, SavedModelProcess, export, verify
from tfopt.graph import freeze
from tfopt.graph.edit import NodeDef
from tfopt.graph.unsafe_ops import EFFECTS, check_saved_model, touched
from tfopt.quantization import QuantizationConfig, quantize

SUSPICIOUS_NAME = re.compile(
    r"File|Path|Read(?!y)|Write|Save|Restore|Load|Record|Snapshot|Summary|Print|Dump|Debug|Rpc|DataService|Remote|Py"
    r"|Sql|LMDB|CSV|Checkpoint|Asset|Vocab|Server|Client|Url|ImportEvent|Abort|Exec|CustomCall|Mlir|FromGraph"
)
SUSPICIOUS_FIELD = re.compile(
    r"file(?!_)|filename|file_pattern|path(?!s$)|(^|_)dir(?!ection)|directory|url|address|region|prefix|vocab_file|^target$|mlir_mod"
    r"|call_target|graph_def"
)
SAFE = {  # a beginning of the names of ops, and why a model may hold them
    "ReadVariable|AssignVariable|_ReadVariable|Rng|TensorArray": "they read and write tensors in memory",
    "DisableCopyOnRead": "it is about a variable",
    "Reader|IdentityReader": "they continue a reader, which a listed op has made, or read nothing but their input",
    "Write.*Summary|WriteSummary|ImportEvent|FlushSummary|CloseSummary|SummaryWriter|StatsAggregatorSet": "they "
    "continue a writer, which a listed op has made",
    ".*Summary$|.*SummaryV2|StatsAggregatorSummary|.*StatsSummary|.*QuantileSummaries.*": "they return their result",
    ".*SetStatsAggregatorDataset": "the prefix is that of a counter's name",
    "BoostedTreesExampleDebugOutputs|ApproxTopK|TensorSliceDataset|Snapshot$": "they compute from tensors",
    "Print$|PrintV2": "to standard error; a file in the attribute of PrintV2 is looked for",
    "DebugGradient": "an identity for gradients",
    "ShardedFile": "they join strings",
    "IteratorFrom|IteratorTo|MultiDevice": "they name an iterator in memory",
    "DeleteRpc": "it frees the result of a listed op",
    "LoadTPU|LoadAllTPU|TPUExecute|ExecuteTPU|_?TPU|.*TPUEmbedding.*": "they work on a TPU's memory",
    "Xla|_Xla": "they compile functions, which are looked at",
    "SparseMatrix|CSRSparse|DenseToCSR|SparseTensorToCSR|.*WithCsrInput|ConvertTo.*Csr.*|Get.*|Decode.*CSV|DecodeCSV": (
        "a format of sparse matrices, or of text"
    ),
    "ExtractJpeg|DecodeProto|EncodeProto|RetrieveTPU": "they decode strings",
    "CopyTo|CompositeT|_Disconnect|_Host|Copy": "memory of devices",
    "DenseBincount": "no file",
    "SentencepieceVocabSizeOp": "of tensorflow_text, if another test has loaded it; it counts words in memory",
}


def registered_ops():
    ops = OpList.FromString(pywrap_tf_session.TF_GetBuffer(pywrap_tf_session.TF_GetAllOpList()))
    return {op.name: op for op in ops.op}


def test_every_op_whose_name_or_fields_suggest_files_network_or_python_is_listed_or_known_to_be_safe():
    ops = registered_ops()
    assert set(EFFECTS) <= set(ops), "a listed op is misspelt, or gone from TensorFlow"
    unknown = []
    for name, op in ops.items():
        fields = [each.name for each in (*op.input_arg, *op.attr)]
        suspicious = SUSPICIOUS_NAME.search(name) or any(map(SUSPICIOUS_FIELD.search, fields))
        if suspicious and name not in EFFECTS and not any(re.match(safe, name) for safe in SAFE):
            unknown.append(name)
    assert not unknown


def test_printing_is_refused_only_to_a_file():
    node = NodeDef(op="PrintV2")
    assert touched(node) is None
    node.attr["output_stream"].s = b"file:///tmp/printed"
    assert touched(node) == ("PrintV2", "files")


class Reads(tf.Module):
    """Reads a file, and writes one that nothing in the output needs."""

    def __init__(self, secret, written):
        super().__init__()
        self.secret, self.written = str(secret), str(written)

    @tf.function(input_signature=[tf.TensorSpec([None, 2], tf.float32, name="x")])
    def serve(self, x):
        tf.io.write_file(self.written, "x")
        return {"y": x * tf.cast(tf.strings.length(tf.io.read_file(self.secret)), tf.float32)}


@pytest.fixture(scope="module")
def reading(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reading")
    (folder / "secret").write_text("abc")
    module = Reads(folder / "secret", folder / "written")
    tf.saved_model.save(module, str(folder / "model"), signatures=module.serve)
    (folder / "written").unlink(missing_ok=True)
    return folder


X = np.ones((4, 2), "float32")


def test_a_foreign_saved_model_with_file_ops_is_refused_before_it_runs(reading, tmp_path, capsys):
    model = str(reading / "model")
    for attempt in (
        lambda: export(model, tmp_path / "out"),
        lambda: export(model, tmp_path / "out", ExportConfig(precision="int8"), calibration_data=X),
        lambda: quantize(model, calibration_data=X),
        lambda: SavedModelProcess(model).__enter__(),
    ):
        with pytest.raises(UnsupportedModelError, match=r"ReadFile at .* touches files.*--trusted"):
            attempt()
    assert main(["export", model, str(tmp_path / "out")]) == 2
    assert "ReadFile" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert not (reading / "written").exists()


def test_a_trusted_model_reads_its_file_when_it_runs_and_not_at_export(reading, tmp_path):
    graph = freeze(reading / "model", trusted=True)
    assert "ReadFile" in {node.op for node in graph.graph_def.node}  # not folded into a constant
    artifact = export(reading / "model", tmp_path / "out", ExportConfig(trusted=True))
    assert b"abc" not in Path(artifact.path, "saved_model.pb").read_bytes()
    with pytest.raises(UnsupportedModelError, match="ReadFile"):
        verify(artifact.path, seconds=0)


@pytest.mark.slow  # 5 s for a fresh process that imports TensorFlow
def test_a_trusted_artifact_is_verified(reading, tmp_path):
    artifact = export(reading / "model", tmp_path / "out", ExportConfig(trusted=True))
    assert main(["verify", artifact.path]) == 2
    assert main(["verify", artifact.path, "--trusted"]) == 0


def keras_model(function):
    inputs = keras.Input((2,))
    return keras.Model(inputs, keras.layers.Lambda(function, output_shape=(2,), name="own")(inputs), name="mine")


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "function",
    [
        lambda x: tf.ensure_shape(tf.py_function(lambda a: a * 2, [x], tf.float32), (None, 2)),
        lambda x: tf.ensure_shape(tf.numpy_function(lambda a: a * 2, [x], tf.float32), (None, 2)),
        lambda x: tf.ensure_shape(tf.numpy_function(lambda a: a * 2, [x], tf.float32, stateful=False), (None, 2)),
        lambda x: tf.map_fn(lambda row: tf.ensure_shape(tf.py_function(abs, [row], tf.float32), (2,)), x),
    ],
    ids=["py_function", "numpy_function", "stateless", "in a loop"],
)
def test_a_python_function_is_refused_by_the_name_of_its_layer_also_in_a_trusted_model(function, tmp_path):
    for config in (ExportConfig(), ExportConfig(trusted=True)):
        with pytest.raises(UnsupportedModelError, match=r"PyFunc.* at .*touches Python"):
            export(keras_model(function), tmp_path / "out", config)


def test_file_ops_of_a_keras_model_are_refused_by_the_name_of_the_layer(tmp_path):
    model = keras_model(lambda x: x * tf.cast(tf.strings.length(tf.io.read_file("/dev/null")), "float32"))
    with pytest.raises(UnsupportedModelError, match=r"ReadFile at 'mine.*/own.*/ReadFile' touches files"):
        export(model, tmp_path / "out")
    lines = keras_model(lambda x: x + tf.cast(next(iter(tf.data.TextLineDataset("/dev/null"))) == "", "float32"))
    with pytest.raises(UnsupportedModelError, match="TextLineDataset"):
        export(lines, tmp_path / "out")


def test_code_in_a_keras_file_is_refused_unless_it_is_trusted(tmp_path):
    keras_model(lambda x: x * 2).save(tmp_path / "own.keras")
    with pytest.raises(ArtifactError, match=r"(?s)Lambda.*pass trusted=True \(--trusted\)") as refused:
        freeze(tmp_path / "own.keras")
    assert "safe_mode" not in str(refused.value)
    with pytest.raises(ArtifactError, match="trusted=True"):
        quantize(tmp_path / "own.keras", QuantizationConfig(training=True), calibration_data=X)
    assert freeze(tmp_path / "own.keras", trusted=True).predict(X)["output_0"].tolist() == (2 * X).tolist()


class Looks(tf.Module):
    """Looks strings up in a table that an initialiser fills from a text file."""

    def __init__(self, words):
        super().__init__()
        index = tf.lookup.TextFileIndex
        initializer = tf.lookup.TextFileInitializer(
            str(words), tf.string, index.WHOLE_LINE, tf.int64, index.LINE_NUMBER
        )
        self.table = tf.lookup.StaticHashTable(initializer, -1)
        self.scale = tf.Variable(2.0)

    @tf.function(input_signature=[tf.TensorSpec([None], tf.string, name="x")])
    def serve(self, x):
        return {"y": self.scale * tf.cast(self.table.lookup(x), tf.float32)}


@pytest.fixture(scope="module")
def looking(tmp_path_factory):
    folder = tmp_path_factory.mktemp("looking")
    (folder / "words.txt").write_text("a\nb\n")
    module = Looks(folder / "words.txt")
    tf.saved_model.save(module, str(folder / "model"), signatures=module.serve)
    return folder / "model"


def edited(source, target, edit):
    shutil.copytree(source, target)
    saved = SavedModel.FromString((target / "saved_model.pb").read_bytes())
    edit(saved.meta_graphs[0])
    (target / "saved_model.pb").write_bytes(saved.SerializeToString())
    return target


def nodes(meta, op):
    bodies = (meta.graph_def.node, *(function.node_def for function in meta.graph_def.library.function))
    return [(body, node) for body in bodies for node in body if node.op == op]


def test_a_table_from_an_asset_and_the_saver_are_the_models_own(looking):
    saved = SavedModel.FromString((looking / "saved_model.pb").read_bytes()).meta_graphs[0]
    ops = {node.op for function in saved.graph_def.library.function for node in function.node_def}
    assert {"InitializeTableFromTextFileV2", "RestoreV2", "SaveV2"} <= ops
    check_saved_model(looking)


def lead_out(meta):
    meta.asset_file_def[0].filename = "../../../words.txt"


def name_a_file(meta):
    for body, node in nodes(meta, "InitializeTableFromTextFileV2"):
        named = body.add(name="named", op="Const")
        named.attr["dtype"].type = tf.string.as_datatype_enum
        named.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(b"/etc/passwd"))
        node.input[1] = "named:output:0"


def restore_in_an_initialiser(meta):
    (_, restore), (body, _) = nodes(meta, "RestoreV2")[0], nodes(meta, "InitializeTableFromTextFileV2")[0]
    body.add(name="restore", op="RestoreV2").attr["dtypes"].CopyFrom(restore.attr["dtypes"])


def restore_another_file(meta):
    for body, node in nodes(meta, "RestoreV2"):
        node.input[0] = body.add(name="named", op="Const").name + ":output:0"


def call_the_saver(meta):
    saver = next(each for each in meta.graph_def.node if each.name == meta.saver_def.restore_op_name)
    call = meta.graph_def.node.add()
    call.CopyFrom(saver)
    call.name = "again"
    meta.signature_def["serving_default"].outputs["y"].name = "again:0"


def hide_in_a_data_set(meta):
    body, _ = nodes(meta, "InitializeTableFromTextFileV2")[0]
    body.add(name="mapped", op="MapDataset").attr["f"].func.name = "reads"
    reads = meta.graph_def.library.function.add()
    reads.signature.name = "reads"
    reads.node_def.add(name="rows", op="TFRecordDatasetV2")


@pytest.mark.parametrize(
    "edit",
    [lead_out, name_a_file, restore_in_an_initialiser, restore_another_file, call_the_saver, hide_in_a_data_set],
    ids=lambda edit: edit.__name__,
)
def test_other_files_are_refused_wherever_they_are_named(looking, tmp_path, edit):
    with pytest.raises(UnsupportedModelError, match="touches files"):
        check_saved_model(edited(looking, tmp_path / "edited", edit))


def test_a_link_to_a_file_outside_is_no_asset(looking, tmp_path):
    edited(looking, tmp_path / "linked", lambda meta: None)
    asset = tmp_path / "linked/assets/words.txt"
    asset.unlink()
    asset.symlink_to("/etc/passwd")
    with pytest.raises(UnsupportedModelError, match="InitializeTableFromTextFileV2"):
        check_saved_model(tmp_path / "linked")


@pytest.mark.parametrize("writes", [False, True])
def test_a_saved_model_of_tensorflow_1_may_restore_its_variables_but_not_write_at_load(tmp_path, writes):
    v1 = tf.compat.v1
    with tf.Graph().as_default(), v1.Session() as session:
        x = v1.placeholder(tf.float32, (None, 2), name="x")
        weight = v1.get_variable("w", initializer=3.0, use_resource=True)
        builder = v1.saved_model.Builder(str(tmp_path / "model"))
        session.run(v1.global_variables_initializer())
        signature = v1.saved_model.predict_signature_def({"x": x}, {"y": x * weight})
        init = tf.io.write_file(str(tmp_path / "written"), "x") if writes else None
        builder.add_meta_graph_and_variables(
            session, ["serve"], {"serving_default": signature}, main_op=init, strip_default_attrs=True
        )
        builder.save()
    if not writes:
        assert freeze(tmp_path / "model").predict(X)["y"].tolist() == (3 * X).tolist()
        return
    with pytest.raises(UnsupportedModelError, match="WriteFile"):
        freeze(tmp_path / "model")
    assert not (tmp_path / "written").exists()


@pytest.mark.parametrize("asset", [True, False])
def test_a_table_of_tensorflow_1_is_filled_from_an_asset_and_from_no_other_file(tmp_path, asset):
    v1, words = tf.compat.v1, tmp_path / "words.txt"
    words.write_text("a\nb\n")
    with tf.Graph().as_default(), v1.Session() as session:
        index = tf.lookup.TextFileIndex
        initializer = tf.lookup.TextFileInitializer(
            str(words), tf.string, index.WHOLE_LINE, tf.int64, index.LINE_NUMBER
        )
        x = v1.placeholder(tf.string, (None,), name="x")
        y = tf.lookup.StaticHashTable(initializer, -1).lookup(x)
        assets = v1.get_collection(v1.GraphKeys.ASSET_FILEPATHS) if asset else None
        builder = v1.saved_model.Builder(str(tmp_path / "model"))
        signature = v1.saved_model.predict_signature_def({"x": x}, {"y": y})
        builder.add_meta_graph_and_variables(
            session, ["serve"], {"serving_default": signature}, assets, v1.tables_initializer()
        )
        builder.save()
    if asset:
        check_saved_model(tmp_path / "model")
        return
    with pytest.raises(UnsupportedModelError, match="touches files"):
        check_saved_model(tmp_path / "model")


def test_a_path_that_is_no_utf_8_is_named(looking, tmp_path):
    with pytest.raises(ArtifactError, match="text in UTF-8"):
        check_saved_model(shutil.copytree(looking, tmp_path / "model\udcff"))
