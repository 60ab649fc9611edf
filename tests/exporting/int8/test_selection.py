"""Which nodes are chosen for int8: by tables of times made up for the purpose, and by the clock."""

import contextlib
import itertools
import json
from dataclasses import replace

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tfopt.atomic.checked_json import with_checksum
from tfopt.errors import ConfigError, TfoptWarning
from tfopt.exporting import ExportConfig, export
from tfopt.exporting.int8.selection import SINK, SOURCE, FlowNetwork, fastest_fit, select_int8, stay_float, time_ratios
from tfopt.exporting.int8.time_table import TimedGraph, feeds_of
from tfopt.exporting.lowering import STORED, lower
from tfopt.graph import freeze
from tfopt.hardware import detect
from tfopt.quantization import QuantizationConfig, WeightOnlyConfig, quantize

X = np.random.default_rng(0).normal(size=(16, 8, 8, 4)).astype("float32")


def residual():
    x = inputs = keras.Input((8, 8, 4))
    r = layers.Conv2D(4, 3, padding="same", activation="relu", name="stem")(x)
    left = layers.Conv2D(4, 3, padding="same", name="left")(r)
    x = layers.ReLU()(left + layers.Conv2D(4, 1, name="right")(r))
    x = layers.Activation("softplus")(x)  # float in any case
    x = layers.Conv2D(4, 3, activation="relu", name="last")(x)
    return keras.Model(inputs, layers.Dense(2, name="head")(layers.Flatten()(x)))


@pytest.fixture(scope="module")
def quantized():
    return quantize(residual(), calibration_data=X)


def table(tmp_path, quantized, times, conversion=0.0, sizes=(1, 10**6), batch_sizes=(1,)):
    """Writes a table in which a fusion named like a key takes (float ms, int8 ms)."""
    fusions = {
        change.name: {"float_ms": [single] * len(batch_sizes), "int8_ms": [int8] * len(batch_sizes)}
        for change in quantized.report.changed
        for name, (single, int8) in times.items()
        if name in change.name
    }
    path = tmp_path / "times.json"
    conversions = {op: [conversion] * len(sizes) for op in ("QuantizeV2", "Dequantize")}
    content = {"device": "made up", "batch_sizes": batch_sizes, "fusions": fusions, "sizes": sizes}
    path.write_text(json.dumps(with_checksum(content | {"conversions": conversions})))
    return path


def named(graph, x):
    return dict.fromkeys(graph.inputs, x)


def select(quantized, path, batch_sizes=(1,)):
    feeds = feeds_of(quantized.float_graph, named(quantized.float_graph, X), batch_sizes)
    chosen, _ = select_int8(quantized, feeds, path)
    return chosen, {change.name.split("/")[1].removesuffix("_1") for change in chosen.report.changed}


NAMES = ("stem", "left", "right", "last", "head")


@pytest.mark.parametrize("in_int8", [set(), *({name} for name in NAMES), {*NAMES[1:4]}, {*NAMES}])
def test_where_conversions_are_free_each_node_goes_where_it_is_faster(tmp_path, quantized, in_int8):
    times = {name: (2.0, 1.0) if name in in_int8 else (1.0, 2.0) for name in NAMES}
    chosen, names = select(quantized, table(tmp_path, quantized, times))
    assert names == in_int8
    assert all("slower in int8: 2.000 ms in int8, 1.000 ms in float32" in skip.reason for skip in chosen.report.skipped)


@pytest.mark.parametrize(
    ("conversion", "expected"),
    [(0.1, {"stem", "left", "right", "last", "head"}), (0.72, {"stem", "left", "right"}), (3.0, set())],
)
def test_conversions_are_weighed_against_what_int8_saves(tmp_path, quantized, conversion, expected):
    """The first three save 1.5 ms for two conversions; the other two 0.7 ms for one, a product's own being fused."""
    times = dict.fromkeys(("stem", "left", "right"), (1.0, 0.5)) | dict.fromkeys(("last", "head"), (0.5, 0.15))
    chosen, names = select(quantized, table(tmp_path, quantized, times, conversion))
    assert names == expected
    assert all("converting its tensors" in skip.reason for skip in chosen.report.skipped)


def test_a_slow_node_between_fast_ones_stays_in_int8_if_that_spares_two_conversions(tmp_path, quantized):
    times = dict.fromkeys(NAMES, (1.0, 0.1)) | {"right": (0.1, 0.2)}
    assert "right" in select(quantized, table(tmp_path, quantized, times, conversion=0.2))[1]
    assert "right" not in select(quantized, table(tmp_path, quantized, times, conversion=0.0))[1]


def test_each_batch_size_counts_alike(tmp_path, quantized):
    times = dict.fromkeys(NAMES, (1.0, 0.5))
    path = table(tmp_path, quantized, times, batch_sizes=(1, 8))
    content = json.loads(path.read_text())
    for name, fusion in content["fusions"].items():
        # Twice as fast at batch size 1; at 8 a hundred times the milliseconds, and "head" there hardly slower.
        fusion["float_ms"][1], fusion["int8_ms"][1] = (100.0, 110.0) if "head" in name else (100.0, 300.0)
    path.write_text(json.dumps(with_checksum(content)))
    assert select(quantized, path, batch_sizes=(1, 8))[1] == {"head"}
    # Of the milliseconds, int8 takes 80 fewer at batch size 8. Of the time, it takes twice as much at 1.
    for fusion in content["fusions"].values():
        fusion["float_ms"], fusion["int8_ms"] = [1.0, 100.0], [2.0, 20.0]
    path.write_text(json.dumps(with_checksum(content)))
    skipped = select(quantized, path, batch_sizes=(1, 8))[0].report.skipped
    assert len(skipped) == len(NAMES)
    assert all(skip.reason.startswith("slower in int8") for skip in skipped)


@pytest.mark.parametrize(
    ("one_kernel", "expected"),
    [([0.1, 9.0], 1), *(pytest.param(each, 0, marks=pytest.mark.slow) for each in ([0.1, 21.0], [3.0, 1.0]))],
)
def test_a_layer_normalization_gets_the_kernel_of_onednn_where_that_is_faster(tmp_path, one_kernel, expected):
    """Each batch size counts alike: 1 ms of 2 weighs as much as 10 ms of 20."""
    inputs = keras.Input((16, 64))
    model = keras.Model(inputs, layers.Dense(64, name="head")(layers.LayerNormalization(name="norm")(inputs)))
    x = np.random.default_rng(0).normal(size=(8, 16, 64)).astype("float32")
    quantized = quantize(model, calibration_data=x)
    feeds, path = feeds_of(quantized.float_graph, named(quantized.float_graph, x), (1, 8)), tmp_path / "times.json"
    select_int8(quantized, feeds, path)
    content = json.loads(path.read_text())
    ((name, measured),) = content["layer_norms"].items()
    assert all(ms > 0 for times in measured.values() for ms in times)
    (fusion,) = content["fusions"]
    content["fusions"][fusion] = {"float_ms": [2.0, 20.0], "int8_ms": [1.0, 10.0]}
    content["layer_norms"][name] = {"float_ms": [1.0, 10.0], "int8_ms": one_kernel}
    (ratios,) = content.pop("whole").values()
    assert len(ratios) == 2
    path.write_text(json.dumps(with_checksum(content)))
    _, lowered = select_int8(quantized, feeds, path)
    assert sum(node.op == "_MklLayerNorm" for node in lowered.graph_def.node) == expected
    plain, found = quantized.predict(x), lowered.predict(x)["output_0"]
    np.testing.assert_allclose(found, plain, atol=1e-3 * np.abs(plain).max())


@pytest.mark.parametrize(
    ("whole", "expected"),
    [
        ({"chosen": [1.2], "all": [1.3]}, set()),
        ({"chosen": [0.8], "all": [1.3]}, {"stem", "left"}),
        ({"chosen": [1.2], "all": [0.9]}, set(NAMES)),
        ({}, {"stem", "left"}),  # a file of an earlier version
    ],
)
def test_the_times_of_whole_graphs_in_a_file_decide_as_when_they_were_measured(tmp_path, quantized, whole, expected):
    times = {name: (2.0, 1.0) if name in ("stem", "left") else (1.0, 2.0) for name in NAMES}
    path = table(tmp_path, quantized, times)
    path.write_text(json.dumps(with_checksum(json.loads(path.read_text()) | {"whole": whole})))
    chosen, names = select(quantized, path)
    assert names == expected
    assert ("1.20x at batch size 1 of float32's time" in str(chosen.report)) == (not expected)


def brute_force(nodes, edges):
    best = {}
    for bits in itertools.product((False, True), repeat=nodes):
        side = [True, False, *bits]
        cost = sum(capacity for source, target, capacity in edges if side[source] and not side[target])
        best.setdefault(cost, []).append({node for node, on_source_side in enumerate(side) if on_source_side})
    return best[min(best)]


@pytest.mark.parametrize("seed", range(20))
def test_the_cut_is_the_cheapest_of_all(seed):
    generator = np.random.default_rng(seed)
    network = FlowNetwork()
    nodes = [network.node() for _ in range(7)]
    pairs = (
        [(SOURCE, node) for node in nodes] + [(node, SINK) for node in nodes] + list(itertools.permutations(nodes, 2))
    )
    edges = [(*pair, int(generator.integers(0, 20))) for pair in pairs if generator.random() < 0.6] or [
        (SOURCE, SINK, 1)
    ]
    for edge in edges:
        network.edge(*edge)
    assert network.source_side() in brute_force(7, edges)


def large():
    """Three convolutions that int8 makes several times as fast."""
    x = inputs = keras.Input((32, 32, 64))
    for number in range(3):
        x = layers.Conv2D(256, 3, padding="same", activation="relu", name=f"conv{number}")(x)
    return keras.Model(inputs, layers.GlobalAveragePooling2D()(x))


@pytest.mark.timed
@pytest.mark.slow
@pytest.mark.skipif(
    not {"avx512_vnni", "avx_vnni"} & set(detect().cpu_features), reason="int8 is only faster with VNNI instructions"
)
def test_by_the_clock_large_convolutions_are_int8_and_the_times_are_stored(tmp_path):
    x = np.random.default_rng(0).normal(size=(4, 32, 32, 64)).astype("float32")
    times = tmp_path / "times.json"
    config = ExportConfig(precision="int8", batch_sizes=(4,), node_times=str(times))
    model = large()
    artifact = export(model, tmp_path / "a", config, calibration_data=x)
    assert len(artifact.report.changed) == 3
    assert artifact.precision == "int8"
    stored = json.loads(times.read_text())
    assert stored["batch_sizes"] == [4]
    assert all(fusion["int8_ms"][0] < fusion["float_ms"][0] for fusion in stored["fusions"].values())
    for fusion in stored["fusions"].values():
        fusion["int8_ms"] = [1e3]
    del stored["whole"]
    times.write_text(json.dumps(with_checksum(stored)))
    with pytest.warns(TfoptWarning, match=r"changed nothing: slower in int8: 1000\.000 ms in int8"):
        artifact = export(model, tmp_path / "b", config, calibration_data=x)
    assert artifact.precision == json.loads((tmp_path / "b" / "manifest.json").read_text())["precision"] == "float32"


@pytest.mark.parametrize(
    ("fast", "precision", "error"), [({"stem", "left"}, "int8", 0.15), (set(), "int8_weight_only", 0.05)]
)
@pytest.mark.filterwarnings("error")
def test_weights_of_nodes_that_stay_float_are_stored_in_int8_if_asked(tmp_path, fast, precision, error):
    model = residual()
    quantized = quantize(model, QuantizationConfig(exclude=("*/right*",)), calibration_data=X)
    times = table(tmp_path, quantized, {name: (2.0, 1.0) if name in fast else (1.0, 2.0) for name in NAMES})
    config = ExportConfig(
        precision="int8",
        batch_sizes=(1,),
        node_times=str(times),
        float_weights="int8",
        weight_only=WeightOnlyConfig(minimum_size=1),
    )
    artifact = export(quantized, tmp_path / "a", config)
    assert artifact.precision == precision
    stored = [step for step in artifact.report.steps if step.kind == "weights stored in int8"]
    assert len(stored) == len(NAMES) - len(fast) - 1
    assert all("computes in float32" in step.detail for step in stored)
    nodes = {node.name: node for node in quantized.float_graph.graph_def.node}
    (kept,) = (skip.name for skip in quantized.report.skipped)  # excluded by name, so its weights stay float32
    assert not any(nodes[kept].input[1] == step.name for step in stored)
    loaded = tf.saved_model.load(str(tmp_path / "a")).signatures["serving_default"](tf.constant(X))
    expected = model(X).numpy()
    assert np.linalg.norm(next(iter(loaded.values())) - expected) < error * np.linalg.norm(expected)


def test_all_signatures_have_the_int8_weights_of_nodes_that_stay_float(tmp_path, quantized):
    times = table(tmp_path, quantized, {name: (2.0, 1.0) if name == "stem" else (1.0, 2.0) for name in NAMES})
    config = ExportConfig(
        precision="int8",
        batch_sizes=(1,),
        node_times=str(times),
        float_weights="int8",
        weight_only=WeightOnlyConfig(minimum_size=1),
        float_fallback=True,
        xla_signature=True,
    )
    constants = [
        [node.attr["value"].tensor for node in graph.graph_def.node if node.op == "Const"]
        for graph in lower(quantized, config, None, None).graphs.values()
    ]
    first, *others = [{each.SerializeToString() for each in given if each.ByteSize() > 100} for given in constants]
    assert len(first) == 4  # of "right", the weights are fewer
    assert others == [first, first]


def test_weights_that_are_excluded_by_name_may_be_those_of_a_node_in_int8(tmp_path, quantized):
    (stem,) = (change.name for change in quantized.report.changed if "stem" in change.name)
    config = ExportConfig(precision="int8", batch_sizes=(1,), float_weights="int8")
    without_stem = replace(config, weight_only=WeightOnlyConfig(minimum_size=1, exclude=(stem,)))
    for float_ms in (2.0, 0.5):
        times = table(tmp_path, quantized, dict.fromkeys(NAMES, (0.5, 1.0)) | {"stem": (float_ms, 1.0)})
        lowered = lower(quantized, replace(without_stem, node_times=str(times)), None, None)
        assert sum(step.kind == STORED for step in lowered.report.steps) == len(NAMES) - 1
    unknown = replace(config, weight_only=WeightOnlyConfig(exclude=("nowhere",)), node_times=str(tmp_path / "new.json"))
    with pytest.raises(ConfigError, match="'nowhere' matches none"):
        lower(quantized, unknown, None, None)
    assert not (tmp_path / "new.json").exists()  # refused before the measurement


@pytest.mark.slow
@pytest.mark.parametrize("float_weights", [pytest.param("float32", marks=pytest.mark.slow), "int8"])
def test_the_float_signatures_of_a_model_that_stays_float_take_no_space(tmp_path, float_weights):
    x = inputs = keras.Input((4, 4, 64))
    names = ("conv0", "conv1")
    for name in names:
        x = layers.Conv2D(256, 3, padding="same", activation="relu", name=name)(x)
    model = keras.Model(inputs, layers.GlobalAveragePooling2D()(x))
    x = np.ones((2, 4, 4, 64), "float32")
    quantized = quantize(model, calibration_data=x)
    times = table(tmp_path, quantized, dict.fromkeys(names, (1.0, 2.0)))
    config = ExportConfig(precision="int8", batch_sizes=(1,), node_times=str(times), float_weights=float_weights)
    sizes = {}
    for fallback in (False, True):
        directory = tmp_path / str(fallback)
        with contextlib.nullcontext() if float_weights == "int8" else pytest.warns(TfoptWarning, match="nothing"):
            export(quantized, directory, replace(config, float_fallback=fallback, xla_signature=fallback))
        sizes[fallback] = sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())
    assert sizes[True] < 1.1 * sizes[False]  # two copies of the weights would make it far larger
    signatures = tf.saved_model.load(str(tmp_path / "True")).signatures
    results = [next(iter(signature(tf.constant(x)).values())) for signature in signatures.values()]
    assert len(results) == 3
    for result in results[1:]:
        np.testing.assert_allclose(result, results[0], rtol=1e-4, atol=1e-6)


def test_stored_weights_belong_to_int8():
    with pytest.raises(ConfigError, match="float_weights belongs to precision='int8'"):
        ExportConfig(precision="float16", float_weights="int8")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: "no JSON", "must be a file that an export wrote"),
        (lambda content: json.dumps(content | {"batch_sizes": [2]}), r"measured at batch sizes \[2\]"),
        (lambda content: json.dumps(content | {"fusions": {}}), "lacks '.*stem.*'"),
        (
            lambda content: json.dumps(content | {"layer_norms": {"norm": {"float_ms": [1.0], "int8_ms": []}}}),
            r"a time of at least 0 for each of its batch sizes \[1\].*with \[\] for 'norm'",
        ),
        (lambda content: json.dumps(content | {"whole": {"all": [0.9, 1.0]}}), r"at least 0.*\[0\.9, 1\.0\] for 'all'"),
        (lambda content: json.dumps({**with_checksum(content), "device": "other"}), "checksum does not match"),
        (
            lambda content: json.dumps(content | {"conversions": {"Dequantize": [-1.0]}}),
            r"at least 0.*for 'Dequantize'",
        ),
        (lambda content: json.dumps(content).replace("0.5", "NaN", 1), r"a time of at least 0.*with \[nan\] for"),
    ],
)
def test_a_table_that_does_not_fit(tmp_path, quantized, change, message):
    path = table(tmp_path, quantized, dict.fromkeys(NAMES, (1.0, 0.5)))
    path.write_text(change(json.loads(path.read_text())))
    with pytest.raises(ConfigError, match=message):
        select(quantized, path)


def test_a_model_that_stays_float_is_that_of_the_float_export():
    inputs = keras.Input((8, 8, 4))
    model = keras.Model(inputs, layers.Conv2D(3, 3, use_bias=False)(inputs))
    quantized = quantize(model, calibration_data=X)
    exported = freeze(model)
    assert sorted(node.op for node in quantized.in_float().graph_def.node) == sorted(
        node.op for node in exported.graph_def.node
    )
    np.testing.assert_array_equal(quantized.in_float().predict(X)["output_0"], exported.predict(X)["output_0"])


def test_the_verdict_of_the_clock_is_given_once(tmp_path, quantized):
    float_alone = select(quantized, table(tmp_path, quantized, dict.fromkeys(NAMES, (1.0, 2.0))))[0]
    for chosen, reason in ((quantized, "the model as a whole"), (float_alone, "slower in int8: 2.000 ms in int8")):
        report = stay_float(quantized, chosen, {1: 1.02, 8: 0.99}).report
        assert report.changed == []
        assert len(report.skipped) == len(NAMES)
        assert all(skip.reason.startswith(reason) for skip in report.skipped)
        assert str(report).count("1.02x at batch size 1 and 0.99x at batch size 8 of float32's time") == 1


@pytest.mark.timed
@pytest.mark.slow
def test_graphs_are_called_in_turns_until_it_is_clear_that_none_is_fit(monkeypatch):
    monkeypatch.setattr("tfopt.exporting.int8.selection.TURN_SECONDS", 0.01)

    def graph_of(width, depth):
        inputs = keras.Input((16,), name="x")
        hidden = inputs
        for _ in range(depth):
            hidden = layers.Dense(width, activation="tanh")(hidden)
        return freeze(keras.Model(inputs, layers.Dense(2)(hidden)))

    # Far apart, more than a loaded machine can hide: a million multiply-adds for each row, and 300.
    small, large = graph_of(16, 1), graph_of(1024, 2)
    feeds = {size: {"x": np.ones((size, 16), "float32")} for size in (1, 8)}
    with TimedGraph(small) as fast, TimedGraph(large) as slow:
        ratios = time_ratios(fast, [slow, slow], feeds)
        assert [len(each) for each in ratios] == [2, 2]
        assert all(ratio > 1.2 for each in ratios for ratio in each), ratios
        assert fastest_fit(ratios) is None
        assert fastest_fit(time_ratios(slow, [fast], feeds)) == 0
        assert fastest_fit(time_ratios(slow, [slow, fast], feeds)) == 1


def test_a_table_of_an_older_version_says_chains(tmp_path, quantized):
    path = table(tmp_path, quantized, {name: (2.0, 1.0) if name == "last" else (1.0, 2.0) for name in NAMES})
    content = json.loads(path.read_text())
    content["chains"] = content.pop("fusions")
    path.write_text(json.dumps(with_checksum(content)))
    assert select(quantized, path)[1] == {"last"}


def test_a_table_that_could_not_be_written_is_refused_before_the_work(tmp_path, quantized):
    config = ExportConfig(precision="int8", node_times=str(tmp_path / "nowhere" / "times.json"))
    with pytest.raises(ConfigError, match="node_times must be a file in a directory that exists"):
        export(quantized, tmp_path / "int8", config)
    assert not (tmp_path / "int8").exists()


@pytest.mark.parametrize(
    "settings", [{"int8_nodes": "some"}, {"batch_sizes": ()}, {"batch_sizes": (0,)}, {"batch_sizes": 5}]
)
def test_settings_out_of_range(settings):
    with pytest.raises(ConfigError, match=next(iter(settings))):
        ExportConfig(**settings)


def test_feeds():
    graph = quantize(residual(), calibration_data=X).float_graph
    feeds = feeds_of(graph, named(graph, X[:3]), (1, 8))
    name = next(iter(graph.inputs))
    np.testing.assert_array_equal(feeds[8][name], np.concatenate([X[:3]] * 3)[:8])
    assert feeds_of(graph, None, (2,))[2][name].shape == (2, 8, 8, 4)
