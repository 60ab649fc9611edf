"""What only a GPU can show of the path from training to an artifact."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfopt
from tfopt.exporting import SavedModelProcess
from tfopt.hardware import detect

pytestmark = pytest.mark.gpu


def test_the_plan_uses_the_tensor_cores():
    capability = detect().gpus[0].compute_capability
    expected = "mixed_bfloat16" if capability >= (8, 0) else "mixed_float16" if capability >= (7, 0) else "float32"
    plan = tfopt.plan(tfopt.TrainingConfig(strategy="none"))
    assert plan.precision == expected
    assert plan.jit_compile


def test_a_run_trains_on_the_gpu_and_its_artifacts_verify(tmp_path):
    recipe = tfopt.recipes.RECIPES["digits_cnn"].quick()
    result = tfopt.run(tfopt.Recipe(**{**vars(recipe), "export_dir": str(tmp_path / "digits")}))
    assert result.ok
    assert result.report.utilization.source.startswith("NVML")
    assert "GPU" in next(iter(result.model.weights)).value.device
    assert result.receipts["float32"].device == detect().gpus[0].name


def test_float32_export_of_a_half_precision_model_computes_in_float32():
    plan = tfopt.plan(tfopt.TrainingConfig(precision="mixed_float16", strategy="none"))
    with plan.scope():
        model = tfopt.models.simple_cnn((32, 32, 1), 10)
    from tfopt.graph import freeze

    x = np.random.default_rng(0).random((4, 32, 32, 1), dtype=np.float32)
    frozen = freeze(model)
    assert all(node.attr["T"].type != tf.float16.as_datatype_enum for node in frozen.graph_def.node if "T" in node.attr)
    assert frozen.predict(x)["output_0"] == pytest.approx(keras.ops.convert_to_numpy(model(x)), abs=0.05)


@pytest.fixture(scope="module")
def trained():
    """A small CNN with the weights of a few steps, and examples."""
    x = np.random.default_rng(0).random((64, 32, 32, 3), dtype=np.float32)
    model = tfopt.models.simple_cnn((32, 32, 3), 10)
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.fit(x, np.arange(64) % 10, epochs=2, verbose=0)
    return model, x


@pytest.mark.parametrize("compute", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("signature", ["serving_default", "serving_xla"])
def test_an_artifact_computes_on_the_gpu_what_the_model_does(trained, tmp_path, compute, signature):
    model, x = trained
    tfopt.export(model, tmp_path / "artifact", tfopt.ExportConfig(compute=compute, xla_signature=True))
    with SavedModelProcess(tmp_path / "artifact", signature) as served:
        (outputs,) = served.predict(dict.fromkeys(served.loaded["inputs"], x)).values()
        assert "GPU" in served.loaded["devices"]
    expected = keras.ops.convert_to_numpy(model(x))
    bits = {"float32": 10, "float16": 10, "bfloat16": 7}[
        compute
    ]  # float32 products have the mantissa of TensorFloat-32
    assert np.abs(outputs - expected).max() < 8 * 2.0**-bits * np.abs(expected).max()


def test_an_int8_artifact_is_right_where_its_kernels_run_on_the_host(trained, tmp_path):
    model, x = trained
    config = tfopt.ExportConfig(precision="int8", int8_nodes="all")
    tfopt.export(model, tmp_path / "artifact", config, calibration_data=x)
    assert any(not each.harmless for each in tfopt.audit(str(tmp_path / "artifact")).on_host)
    assert tfopt.verify(tmp_path / "artifact", seconds=0).ok
    with SavedModelProcess(tmp_path / "artifact") as served:
        (outputs,) = served.predict(dict.fromkeys(served.loaded["inputs"], x)).values()
    expected = keras.ops.convert_to_numpy(model(x))
    assert np.linalg.norm(outputs - expected) < 0.1 * np.linalg.norm(expected)


def test_an_artifact_is_verified_beside_a_process_that_took_the_gpus_memory(fresh_python, tmp_path):
    # TensorFlow takes nearly all of it where no plan has turned its growth on.
    script = f"""
import keras, numpy as np, tfopt
model = tfopt.models.simple_cnn((32, 32, 3), 10)
model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
model.fit(np.random.rand(64, 32, 32, 3).astype("float32"), np.arange(64) % 10, verbose=0)
tfopt.export(model, {str(tmp_path / "artifact")!r})
receipt = tfopt.verify({str(tmp_path / "artifact")!r}, seconds=0)
print(receipt.ok, receipt.device)
"""
    done = fresh_python("-c", script, imported="nothing", check=True)
    assert done.stdout.splitlines()[-1] == f"True {detect().gpus[0].name}"
