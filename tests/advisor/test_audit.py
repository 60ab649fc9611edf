"""The audit of models, scripts, artifacts and recipes for a GPU that is not at hand."""

import json
import re
from dataclasses import replace
from functools import partial

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfopt
from tfopt.advisor.audit import DEFAULT_CARD
from tfopt.cli import main
from tfopt.data.config import DataConfig
from tfopt.errors import ConfigError
from tfopt.hardware import GPU_CARDS
from tfopt.hardware.gpus import card_name
from tfopt.hardware.machine_code import machine_code
from tfopt.profiling.cost import training_memory
from tfopt.recipe import ModelConfig, Recipe
from tfopt.recipes import RECIPES
from tfopt.training import TrainingConfig

# A table of the user's own has any number of columns.
OF_TABLES = {"mlp": {"input_shape": (10,), "outputs": 1}}


def dense(*layers, loss="mse", units=16):
    model = keras.Sequential([keras.Input((64,)), *layers, keras.layers.Dense(units, name="last")])
    model.compile("adam", loss)
    return model


def batch(examples=32, units=16):
    return tf.TensorSpec((examples, 64)), tf.TensorSpec((examples, units))


@pytest.fixture(scope="module")
def small():
    return Recipe(
        name="small",
        model=ModelConfig(builder="simple_cnn", arguments={"filters": [12]}),
        data=DataConfig(source="synthetic", arguments={"examples": 64, "input_shape": [16, 16, 3]}),
        training=TrainingConfig(global_batch_size=32, optimizer="sgd"),
    )


def test_a_batch_of_no_examples_is_refused():
    with pytest.raises(ConfigError, match=r"A batch must hold examples. Received: shape=\(0, 64\)"):
        tfopt.audit(dense(), batch(examples=0), card="A100")


def test_a_usual_model_wants_nothing_and_its_record_survives_json():
    found = tfopt.audit(dense(keras.layers.Dense(30, "relu", name="odd")), batch(), card="A100-80GB")
    assert found.problems == []
    assert (found.lowers, found.machine_code, found.card, found.batch_size) == (True, "native", "A100 SXM4 80GB", 32)
    assert found.tensor_core_share == 1.0  # float32 as TensorFloat-32
    assert [row.split(":")[0] for row in found.misaligned] == ["odd (Dense)"]
    assert tfopt.Audit.from_dict(json.loads(found.to_json())) == found
    on_v100 = tfopt.audit(dense(), batch(), card="V100")
    assert (on_v100.tensor_core_share, on_v100.not_in_tensor_cores) == (0.0, {"float32": 1.0})


def test_a_layer_on_the_host_is_named_and_xla_refuses_it():
    def in_python(x):
        return tf.ensure_shape(tf.numpy_function(lambda each: each, [x], tf.float32), x.shape)

    found = tfopt.audit(dense(keras.layers.Lambda(in_python, name="python")), batch(), card="A100")
    (on_host,) = found.on_host
    assert (on_host.kind, on_host.places) == ("PyFunc", ("python",))
    assert found.lowers is False
    assert "PyFunc" in found.unavailable["lowers"]
    assert len(found.problems) == 2
    assert "python" in str(found)


def test_xla_that_was_not_asked_for_is_no_problem():
    def in_python(x):
        return tf.ensure_shape(tf.numpy_function(lambda each: each, [x], tf.float32), x.shape)

    model = dense(keras.layers.Lambda(in_python, name="python"))
    for off, reason in (({"jit_compile": False}, "jit_compile=False"), ({}, "run_eagerly=True")):
        model.compile("adam", "mse", run_eagerly=not off)
        found = tfopt.audit(model, batch(), card="A100", **off)
        assert (found.lowers, found.jit_compile, found.unavailable["lowers"]) == (None, False, reason)
        assert [each.partition(":")[0] for each in found.problems] == ["on the host"]
        assert "no kernel" not in str(found)
    model.compile("adam", "mse")
    tf.config.run_functions_eagerly(True)
    try:
        assert tfopt.audit(model, batch(), card="A100").unavailable["lowers"] == "run_functions_eagerly(True)"
    finally:
        tf.config.run_functions_eagerly(False)
    compiled = dense()
    tfopt.compile(compiled, tfopt.plan(TrainingConfig(strategy="none")), loss="mse")
    assert tfopt.audit(compiled, batch(), card="A100").lowers  # the plan of a GPU asks for XLA


def test_a_model_that_is_too_large_does_not_fit_and_keeps_its_state():
    model = dense()
    found = tfopt.audit(model, batch(examples=2**28), card="L4")
    assert found.fits is False
    assert any("memory" in each for each in found.problems)
    small = tfopt.audit(model, batch(), card="L4")
    assert small.memory_bytes == pytest.approx(2**30 + training_memory(model, 32).total_bytes, rel=0.01)
    model.fit(np.zeros((32, 64)), np.zeros((32, 16)), verbose=0)


def test_an_lstm_is_audited_with_cudnn_which_xla_does_not_take():
    model = keras.Sequential([keras.Input((5, 8)), keras.layers.LSTM(16, name="recurrent")])
    model.compile("sgd", "mse")
    found = tfopt.audit(model, (tf.TensorSpec((4, 5, 8)), tf.TensorSpec((4, 16))), card="A100")
    assert found.problems == []
    assert (found.lowers, found.jit_compile) == (None, False)
    assert "recurrent" in found.unavailable["lowers"]
    assert {each.kind for each in found.not_in_xla} == {"CudnnRNNV3", "CudnnRNNBackpropV3"}
    assert model.layers[0].supports_jit  # as before: this machine has no cuDNN


def test_the_precision_of_a_recipe_is_that_of_the_plan_for_the_card(small):
    audits = {card: tfopt.audit(small, card=card) for card in ("V100", "A100")}
    assert {card: each.precision for card, each in audits.items()} == {
        "V100": "mixed_float16",
        "A100": "mixed_bfloat16",
    }
    assert all(each.problems == [] and each.lowers for each in audits.values())
    assert audits["V100"].tensor_core_share > 0.9


def test_an_augmentation_on_the_device_is_part_of_the_step(small):
    plain = tfopt.audit(small, card="A100")
    turned = replace(small, data=replace(small.data, augment=tfopt.data.AugmentConfig(rotation_degrees=10)))
    assert tfopt.audit(turned, card="A100").operations > plain.operations


def test_the_command_audits_a_script_up_to_its_fit(tmp_path, capsys):
    script = tmp_path / "train.py"
    script.write_text(
        "import sys, keras, numpy as np\n"
        "print('before')\n"
        "model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(8)])\n"
        "model.compile('sgd', 'mse')\n"
        "model.fit(np.ones((64, 8)), np.ones((64, 8)), batch_size=int(sys.argv[1]))\n"
        "print('after')\n"
    )
    assert main(["devices", "--audit", str(script), "--card", "B200", "--json", "--", "16"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["batch_size"], found["card"], found["machine_code"]) == (16, "B200", "ptx")
    assert f"{script}:5" in found["name"]
    lines = script.read_text()
    for changed, line in (("jit_compile=False", "off (jit_compile=False)"), ("jit_compile=True", "lowers it")):
        script.write_text(lines.replace("'mse'", f"'mse', {changed}"))
        assert main(["devices", "--audit", str(script), "--card", "A100", "--", "16"]) == 0
        assert line in capsys.readouterr().out
    script.write_text(lines.replace("'mse'", "lambda y, predicted: 1 / 0"))
    assert main(["devices", "--audit", str(script), "--", "16"]) == 2
    assert re.search(r"'sequential\w*', whose step raises ZeroDivisionError", capsys.readouterr().err)
    own = "import tfopt; tfopt.compile(model, tfopt.plan(), loss='mse')"
    script.write_text(lines.replace("model.compile('sgd', 'mse')", own))
    assert main(["devices", "--audit", str(script), "--card", "A100", "--", "16"]) == 0
    assert "XLA on" in capsys.readouterr().out  # the plan of a GPU asks for it, that of this machine may not
    for text, message in (
        ("print('no fit')\n", "did not call it"),
        ("import sys; sys.exit(4)\n", "ended with the exit code 4 before"),
    ):
        script.write_text(text)
        assert main(["devices", "--audit", str(script)]) == 3
        assert message in capsys.readouterr().err


def test_what_has_no_kernels_of_tensorflow_is_refused_with_the_way_there_is(tmp_path, capsys):
    dense().save(tmp_path / "model.keras")
    assert main(["devices", "--audit", str(tmp_path / "model.keras")]) == 2
    assert "tfopt.audit(model, (x, y))" in capsys.readouterr().err
    (tmp_path / "model.tflite").write_bytes(b"")
    with pytest.raises(ConfigError, match="audit a SavedModel of the same model"):
        tfopt.audit(tmp_path / "model.tflite")
    assert main(["devices", "--advise", "train.py"]) == 2
    assert "--audit train.py" in capsys.readouterr().err


def test_the_command_finds_an_int8_artifact_wanting_on_a_gpu(tmp_path, capsys):
    model = dense(keras.layers.Dense(32, "relu"))
    tfopt.export(model, tmp_path / "float32")
    assert main(["devices", "--audit", str(tmp_path / "float32"), "--card", "A100"]) == 0
    config = tfopt.ExportConfig(precision="int8", int8_nodes="all")
    tfopt.export(model, tmp_path / "int8", config, calibration_data=np.random.rand(64, 64).astype("float32"))
    capsys.readouterr()
    assert main(["devices", "--audit", str(tmp_path / "int8"), "--card", "A100", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert "_QuantizedMatMul" in {each["kind"] for each in found["on_host"]}
    assert found["precision"] == "int8"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--audit", "mlp"], "--input-shape"),
        (["--audit", "digits_cnn", "--card", "L4O"], "Did you mean"),
        (["--audit", "digits_cnn", "--advise", "digits_cnn"], "must not be given together"),
        (["--audit", "digits_cnn", "--gpus", "8"], "--gpus needs"),
        (["--audit", "digits_cnn", "--", "x"], "for a script"),
        (["--", "x"], "for the script"),
    ],
)
def test_wrong_flags_are_refused(capsys, words, message):
    assert main(["devices", *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("kind", [partial(tf.RaggedTensorSpec, ragged_rank=1), tf.SparseTensorSpec])
def test_a_batch_without_sizes_is_refused(kind):
    for shape, shown in (((8, None), r"\(8, None\)"), (None, "<unknown>")):
        with pytest.raises(ConfigError, match=f"Spec of shape {shown}. Pad it"):
            tfopt.audit(dense(), (kind(shape), tf.TensorSpec((8, 16))), card="A100")


def test_a_model_needs_a_batch():
    with pytest.raises(ConfigError, match="batch must be given"):
        tfopt.audit(dense())


@pytest.mark.parametrize(
    ("name", "card"),
    [
        ("H100", "H100 HBM3"),
        ("h100-80gb", "H100 HBM3"),
        ("H100 SXM", "H100 HBM3"),
        ("A100-80GB", "A100 SXM4 80GB"),
        ("NVIDIA A100-SXM4-40GB", "A100"),
        ("Tesla V100-SXM2-32GB", "V100 SXM2"),
        ("V100-32GB", "V100 SXM3"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("rtx4090", "RTX 4090"),
        ("L4", "L4"),
        ("pretended A100", "A100"),
    ],
)
def test_a_card_is_known_by_its_usual_names(name, card):
    assert card_name(name) == card


@pytest.mark.parametrize(
    "name", ["H100 80GB HBM3 MIG 1g.10gb", "NVIDIA GeForce RTX 4090 Laptop GPU", "A10G", "GH200", ""]
)
def test_a_card_that_only_resembles_a_known_one_is_unknown(name):
    with pytest.raises(ConfigError):
        card_name(name)


def test_every_card_has_code_in_this_tensorflow_and_blackwell_has_only_ptx():
    kinds = {name: machine_code(card.compute_capability).kind for name, card in GPU_CARDS.items()}
    assert {name for name, kind in kinds.items() if kind == "ptx"} == {"B200"}
    assert set(kinds.values()) == {"native", "ptx"}
    assert machine_code((5, 2)).kind == "none"


def test_a_tensorflow_without_kernels_for_gpus_is_refused(monkeypatch):
    monkeypatch.setattr(tf.sysconfig, "get_build_info", lambda: {"is_cuda_build": False})
    with pytest.raises(ConfigError, match="built without CUDA"):
        tfopt.audit(dense(), batch(), card="A100")


def the_same_step(recipe):
    full = recipe.form("full")
    return repr(
        (full.model, full.data.augment, full.training, full.distillation)
    )  # of one model, the examples have one shape


AUDIT = """
import sys, tfopt
print(tfopt.audit(sys.argv[1], card=sys.argv[2], **eval(sys.argv[3])).to_json())
"""


@pytest.mark.slow
@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", {the_same_step(recipe): name for name, recipe in reversed(RECIPES.items())}.values())
def test_the_full_form_of_a_recipe_passes_on_the_card_that_the_docs_name(name, fresh_python):
    # In processes of their own: what TensorFlow keeps of models of this size adds up to gigabytes.
    done = fresh_python("-c", AUDIT, name, DEFAULT_CARD, OF_TABLES.get(name, {}), check=True)
    found = tfopt.Audit.from_dict(json.loads(done.stdout))
    assert found.problems == []
    assert found.fits
    assert found.precision == "mixed_bfloat16"
    assert found.lowers or "cuDNN" in found.unavailable["lowers"]
    assert found.tensor_core_share > 0.5 or name.startswith("mobilenet")
