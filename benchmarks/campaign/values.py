"""Unusual numbers in each public pass and each source: NaN, infinities, no examples, one class."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from campaign.fault import FINITE, Fault, NotFinite, Said

KIND = "numbers"
ROWS, WIDTH, CLASSES = 48, 4, 3
LIMIT_S = 90.0


def _usual() -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype("float32")
    return x, np.arange(ROWS) % CLASSES


def _inputs(change: Callable[[np.ndarray], np.ndarray]) -> Callable[[], tuple[np.ndarray, np.ndarray]]:
    def made() -> tuple[np.ndarray, np.ndarray]:
        x, y = _usual()
        changed = change(x)
        return changed, y[: len(changed)]

    return made


def _labels(change: Callable[[np.ndarray], np.ndarray]) -> Callable[[], tuple[np.ndarray, np.ndarray]]:
    def made() -> tuple[np.ndarray, np.ndarray]:
        x, y = _usual()
        return x, change(y)

    return made


def _put(value: float) -> Callable[[np.ndarray], np.ndarray]:
    def change(x: np.ndarray) -> np.ndarray:
        x = x.copy()
        x[1, 2] = value
        return x

    return change


def _all(value: float) -> Callable[[np.ndarray], np.ndarray]:
    return lambda x: np.full_like(x, value)


def _far(y: np.ndarray) -> np.ndarray:
    return np.where(np.arange(len(y)) == 5, 10**6, y)


DATA: dict[str, Callable[[], tuple[np.ndarray, np.ndarray]]] = {
    "one NaN": _inputs(_put(np.nan)),
    "one infinity": _inputs(_put(np.inf)),
    "one minus infinity": _inputs(_put(-np.inf)),
    "one value of 1e30": _inputs(_put(1e30)),
    "all values NaN": _inputs(_all(np.nan)),
    "all values 0": _inputs(_all(0.0)),
    "all values denormal": _inputs(_all(1e-42)),
    "all values 3e38": _inputs(_all(3e38)),
    "float64 beyond float32": _inputs(lambda x: np.full(x.shape, 1e300)),
    "no examples": _inputs(lambda x: x[:0]),
    "one example": _inputs(lambda x: x[:1]),
    "complex numbers": _inputs(lambda x: x + 1j),
    "Python objects": _inputs(lambda x: x.astype(object)),
    "text": _inputs(lambda x: x.astype(str)),
    "one axis too few": _inputs(lambda x: x[:, 0]),
    "one class": _labels(np.zeros_like),
    "a label of -1": _labels(lambda y: np.where(np.arange(len(y)) == 5, -1, y)),
    "a label out of range": _labels(_far),
    "labels with NaN": _labels(lambda y: np.where(np.arange(len(y)) == 5, np.nan, y)),
}


def _model() -> Any:
    import keras

    keras.utils.set_random_seed(0)
    hidden = keras.layers.Dense(16, activation="relu", name="hidden")
    return keras.Sequential([keras.Input((WIDTH,), name="x"), hidden, keras.layers.Dense(CLASSES, name="head")])


def _finite(values: Any) -> list[np.ndarray]:
    """Returns arrays, unless a value is not finite: that is the silent damage which the campaign looks for."""
    arrays = [np.asarray(each) for each in values]
    for array in arrays:
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise NotFinite(f"{int((~np.isfinite(array)).sum())} of {array.size} values are not finite")
    return arrays


def _weights(model: Any) -> list[np.ndarray]:
    return _finite(model.get_weights())


def _source(x: np.ndarray, y: np.ndarray, place: Path) -> Any:
    from tfopt.data import arrays
    from tfopt.data.user_data import readable

    examples = arrays(x, y)
    with readable():
        found = [row for part in ("train", "test") for row in examples.batches(part, 8).as_numpy_iterator()]
    if not found:
        raise Said("no examples")
    return _finite([each[0] for each in found])


def _npy(x: np.ndarray, y: np.ndarray, place: Path) -> Any:
    from tfopt.data.files.numpy_files import numpy_files

    np.save(place / "x.npy", x, allow_pickle=True)
    np.save(place / "y.npy", y)
    examples = numpy_files(x=place / "x.npy", y=place / "y.npy")
    return _finite([each[0] for each in examples.batches("train", 8).as_numpy_iterator()])


def _table(x: np.ndarray, y: np.ndarray, place: Path) -> Any:
    from tfopt.data.files.tables import csv

    rows = [",".join(map(str, [*np.atleast_1d(row), label])) for row, label in zip(x, y, strict=True)]
    columns = x.shape[1] if x.ndim > 1 else 1
    head = ",".join([*(f"c{number}" for number in range(columns)), "label"])
    (place / "table.csv").write_text("\n".join([head, *rows]) + "\n")
    examples = csv(path=place / "table.csv", target="label")
    return _finite([each[0] for each in examples.batches("train", 8).as_numpy_iterator()])


def _convert(x: np.ndarray, y: np.ndarray, place: Path) -> Any:
    from tfopt.data import arrays, convert
    from tfopt.data.files.tfrecord import tfrecord

    convert(arrays(x, y), place / "records")
    examples = tfrecord(directory=place / "records")
    return _finite([each[0] for each in examples.batches("train", 8).as_numpy_iterator()])


def _fit(x: np.ndarray, y: np.ndarray, place: Path) -> Any:
    import keras

    import tfopt

    plan = tfopt.plan(tfopt.TrainingConfig(precision="float32", global_batch_size=8, epochs=1, jit_compile=False))
    model = _model()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    tfopt.compile(model, plan, optimizer=plan.optimizer(steps_per_epoch=6), loss=loss)
    model.fit(plan.pipeline((x, y)), epochs=1, verbose=0)
    return _weights(model)


def _export(precision: str) -> Callable[[np.ndarray, np.ndarray, Path], Any]:
    def act(x: np.ndarray, y: np.ndarray, place: Path) -> Any:
        import tfopt
        from tfopt.graph import freeze

        config = tfopt.ExportConfig(precision=precision, int8_nodes="all") if precision == "int8" else None
        tfopt.export(_model(), place / "model", config or tfopt.ExportConfig(precision=precision), calibration_data=x)
        graph = freeze(place / "model")
        return _finite(graph.predict({"x": _usual()[0]}).values())

    return act


def _quantize(x: np.ndarray, y: np.ndarray, place: Path) -> Any:
    import tfopt

    quantized = tfopt.quantize(_model(), tfopt.QuantizationConfig(), calibration_data=x)
    return _finite(quantized.graph.predict({"x": _usual()[0]}).values())


def _prune(criterion: str) -> Callable[[np.ndarray, np.ndarray, Path], Any]:
    def act(x: np.ndarray, y: np.ndarray, place: Path) -> Any:
        import keras

        import tfopt

        model = _model()
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        tfopt.prune(model, tfopt.PruningConfig(target_sparsity=0.5, criterion=criterion), data=(x, y))
        return _weights(model)

    return act


def _sensitivity(x: np.ndarray, y: np.ndarray, place: Path) -> Any:
    import keras

    import tfopt

    model = _model()
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    found = tfopt.sensitivity(model, (x, y), tfopt.PruningConfig(target_sparsity=0.5), score="loss")
    return _finite([value for curve in found.to_dict()["curves"].values() for value in curve])


def _teach(x: np.ndarray, y: np.ndarray, place: Path) -> Any:
    import tfopt
    from tfopt.data import arrays

    cached = tfopt.cache_teacher(_model(), arrays(x, y), place / "teacher", batch_size=8)
    rows = list(cached.examples.decoded("train").as_numpy_iterator())
    return _finite([next(iter(row[1]["teacher_outputs"].values())) for row in rows])


ACTS: dict[str, Callable[[np.ndarray, np.ndarray, Path], Any]] = {
    "data.arrays": _source,
    "numpy_files": _npy,
    "csv": _table,
    "data.convert": _convert,
    "compile and fit": _fit,
    "export in int8": _export("int8"),
    "quantize": _quantize,
    "prune by magnitude": _prune("magnitude"),
    "prune by taylor": _prune("taylor"),
    "sensitivity": _sensitivity,
    "cache_teacher": _teach,
}


def _spoiled_weights(value: float) -> Any:
    model = _model()
    weights = model.get_weights()
    weights[0][1, 2] = value
    model.set_weights(weights)
    return model


def _weights_acts() -> dict[str, Callable[[Any, Path], Any]]:
    import tfopt

    def exported(config: Any) -> Callable[[Any, Path], Any]:
        def act(model: Any, place: Path) -> Any:
            from tfopt.graph import freeze

            tfopt.export(model, place / "model", config, calibration_data=_usual()[0])
            return _finite(freeze(place / "model").predict({"x": _usual()[0]}).values())

        return act

    def pruned(model: Any, place: Path) -> Any:
        tfopt.prune(model, tfopt.PruningConfig(target_sparsity=0.5))
        return _weights(model)

    def shrunk(model: Any, place: Path) -> Any:
        return _weights(tfopt.shrink(model, tfopt.StructuredPruningConfig(ratio=0.5)).model)

    def clustered(model: Any, place: Path) -> Any:
        tfopt.cluster(model, tfopt.ClusteringConfig(minimum_size=1))
        return _weights(model)

    kinds = ("float32", "float16", "int8_weight_only", "int4_weight_only")
    exports = {f"export in {kind}": exported(tfopt.ExportConfig(precision=kind)) for kind in kinds}
    int8 = {"export in int8": exported(tfopt.ExportConfig(precision="int8", int8_nodes="all"))}
    files = {
        f"export to {kind}": exported_file(tfopt.ExportConfig(format=kind)) for kind in ("onnx", "litert", "openvino")
    }
    return {**exports, **int8, **files, "prune": pruned, "shrink": shrunk, "cluster": clustered}


def exported_file(config: Any) -> Callable[[Any, Path], Any]:
    """Returns an export to another format, of whose outputs at export the manifest tells whether they are finite."""

    def act(model: Any, place: Path) -> Any:
        import tfopt
        from tfopt.exporting.manifest import read_manifest

        tfopt.export(model, place / "model", config)
        check = read_manifest(place / "model").check
        if any(output.infinite for kind in check.outputs.values() for output in kind.values()):
            raise NotFinite("outputs at export")
        return []

    return act


WEIGHTS = {"a weight is NaN": np.nan, "a weight is infinite": np.inf, "a weight is 1e30": 1e30, "denormal": 1e-42}


def faults(work: Path, *, share: float = 1.0, only: str = "") -> Iterator[Fault]:
    """Yields each pass and source with each kind of data, and each pass with each kind of weights."""
    number = 0
    for part, act in ACTS.items():
        for how, data in DATA.items():
            number += 1
            if (not only or only in f"{KIND}: {part}") and number * share % 1 < share:
                yield _fault(part, how, lambda place, act=act, data=data: act(*data(), place))  # type: ignore[misc]
    for part, pass_ in _weights_acts().items():
        for how, value in WEIGHTS.items():
            number += 1
            if (not only or only in f"{KIND}: {part}") and number * share % 1 < share:
                yield _fault(
                    part,
                    how,
                    lambda place, pass_=pass_, value=value: pass_(_spoiled_weights(value), place),  # type: ignore[misc]
                )


def _fault(part: str, how: str, act: Callable[[Path], Any]) -> Fault:
    return Fault(kind=KIND, part=part, how=how, act=act, must=FINITE, keeps=False, limit_s=LIMIT_S)
