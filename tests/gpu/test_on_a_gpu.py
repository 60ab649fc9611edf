"""What only a GPU can show of the path from training to an artifact."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfopt
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
