"""Files of a stranger: models, recipes and data that would read, write, call or fill what is not theirs.

Each is refused, or read without its effect. The effect is looked for: a file that the model would write, or the bytes
of a secret in what came out.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from campaign.fault import A_WORD, HARMLESS, Fault, Said

KIND = "untrusted"
SECRET = "the secret of this machine"


class Harm(Exception):
    """The file had its effect."""


def _checked(place: Path, found: Any) -> Any:
    """Returns what came out, unless it shows that the stranger's file was obeyed."""
    if SECRET in str(found):
        raise Harm("a file was read")
    return found


def _harmless(act: Callable[[Path], Any]) -> Callable[[Path], Any]:
    """Looks for what the stranger's file would write, also where it is refused in the end."""

    def acted(place: Path) -> Any:
        try:
            return act(place)
        finally:
            if (place / "written").exists() or (place.parent / "written").exists():
                raise Harm("a file was written")

    return acted


def _saved_model(serve: Callable[[Any, Path], Any]) -> Callable[[Path], None]:
    def make(place: Path) -> None:
        import tensorflow as tf

        module = tf.Module()
        secret = place / "secret"
        secret.write_text(SECRET)
        spec = [tf.TensorSpec((None, 4), tf.float32, name="x")]
        module.serve = tf.function(lambda x: {"y": serve(x, place)}, spec, autograph=False)
        tf.saved_model.save(module, str(place / "model"), signatures={"serving_default": module.serve})

    return make


def _ops() -> dict[str, Callable[[Any, Path], Any]]:
    import tensorflow as tf

    raw = tf.raw_ops

    def under_control(x: Any, place: Path) -> Any:
        with tf.control_dependencies([tf.io.write_file(str(place / "written"), "x")]):
            return tf.identity(x)

    def in_a_branch(x: Any, place: Path) -> Any:
        def write() -> Any:
            with tf.control_dependencies([tf.io.write_file(str(place / "written"), "x")]):
                return tf.identity(x)

        return tf.cond(tf.reduce_sum(x) > 0, write, lambda: x)

    def in_a_loop(x: Any, place: Path) -> Any:
        def body(number: Any) -> Any:
            with tf.control_dependencies([tf.io.write_file(str(place / "written"), "x")]):
                return number + 1

        return x + tf.cast(tf.while_loop(lambda number: number < 2, body, [0])[0], tf.float32)

    def in_a_function(x: Any, place: Path) -> Any:
        inner = tf.function(lambda value: under_control(value, place), autograph=False)
        return tf.function(lambda value: inner(value), autograph=False)(x)

    def in_a_data_set(x: Any, place: Path) -> Any:
        lines = tf.data.TextLineDataset(str(place / "secret"))
        return x + tf.cast(lines.reduce(np.int64(0), lambda total, _: total + 1), tf.float32)

    return {
        "writes a file": under_control,
        "writes a file in a branch": in_a_branch,
        "writes a file in a loop": in_a_loop,
        "writes a file in a function of a function": in_a_function,
        "reads a file": lambda x, place: (
            x + tf.cast(tf.strings.length(tf.io.read_file(str(place / "secret"))), "float32")
        ),
        "lists files": lambda x, place: x + tf.cast(tf.size(raw.MatchingFiles(pattern=f"{place}/*")), tf.float32),
        "reads lines in a data set": in_a_data_set,
        "restores a file": lambda x, place: (
            x
            + raw.RestoreV2(
                prefix=str(place / "secret"), tensor_names=["a"], shape_and_slices=[""], dtypes=[tf.float32]
            )[0]
        ),
        "saves a file": lambda x, place: _after(
            raw.SaveV2(prefix=str(place / "written"), tensor_names=["a"], shape_and_slices=[""], tensors=[x]), x
        ),
        "prints to a file": lambda x, place: _after(tf.print(x, output_stream=f"file://{place}/written"), x),
        "calls Python": lambda x, place: tf.ensure_shape(tf.py_function(lambda v: v, [x], tf.float32), (None, 4)),
        "calls NumPy": lambda x, place: tf.ensure_shape(tf.numpy_function(lambda v: v, [x], tf.float32), (None, 4)),
        "ends the process": lambda x, place: _after(raw.Abort(error_msg="stop", exit_without_error=True), x),
        "asks the network": lambda x, place: (
            x
            + tf.cast(
                raw.DataServiceDatasetV4(
                    dataset_id="1",
                    processing_mode="",
                    address="grpc://203.0.113.1:1",
                    protocol="grpc",
                    job_name="",
                    consumer_index=0,
                    num_consumers=1,
                    max_outstanding_requests=1,
                    iteration_counter=raw.DummyIterationCounter(),
                    output_types=[tf.float32],
                    output_shapes=[[]],
                    uncompress_fn=tf.function(lambda v: v).get_concrete_function(tf.TensorSpec((), tf.variant)),
                )
                is not None,
                tf.float32,
            )
        ),
    }


def _after(operation: Any, x: Any) -> Any:
    import tensorflow as tf

    with tf.control_dependencies([operation]):
        return tf.identity(x)


def _freeze(place: Path) -> Any:
    from tfopt.graph import freeze

    graph = freeze(place / "model")
    return _checked(place, graph.predict({"x": np.ones((1, 4), "float32")}))


def _inspect(name: str) -> Callable[[Path], Any]:
    def read(place: Path) -> Any:
        import tfopt

        found = tfopt.inspect(place / name)
        _checked(place, found.to_json())
        if found.outside:
            raise Said("; ".join(map(str, found.outside)))
        return []

    return read


def _keras_with(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    """Writes a .keras file of whose configuration something is changed."""

    def make(place: Path) -> None:
        import keras

        keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)]).save(place / "whole.keras")
        with zipfile.ZipFile(place / "whole.keras") as whole, zipfile.ZipFile(place / "model.keras", "w") as other:
            for name in whole.namelist():
                content = whole.read(name)
                if name == "config.json":
                    config = json.loads(content)
                    change(config)
                    content = json.dumps(config).encode()
                other.writestr(name, content)

    return make


def _lambda(place: Path) -> None:
    import keras

    model = keras.Sequential([keras.Input((4,)), keras.layers.Lambda(lambda x: x * 2)])
    model.save(place / "model.keras")


def _class(module: str, name: str) -> Callable[[dict[str, Any]], None]:
    def change(config: dict[str, Any]) -> None:
        config["config"]["layers"][1] |= {"module": module, "class_name": name, "registered_name": name}

    return change


def _function(module: str, name: str) -> Callable[[dict[str, Any]], None]:
    def change(config: dict[str, Any]) -> None:
        activation = {"module": module, "class_name": "function", "config": name, "registered_name": name}
        config["config"]["layers"][1]["config"]["activation"] = activation

    return change


def _load_keras(place: Path) -> Any:
    from tfopt.graph import freeze

    freeze(place / "model.keras")
    return _checked(place, [])


def _zip_of(names: dict[str, bytes], compression: int = zipfile.ZIP_DEFLATED) -> Callable[[Path], None]:
    def make(place: Path) -> None:
        with zipfile.ZipFile(place / "model.keras", "w", compression) as archive:
            for name, content in names.items():
                archive.writestr(name, content)

    return make


def _recipe(text: str) -> Callable[[Path], None]:
    def make(place: Path) -> None:
        (place / "secret").write_text(SECRET)
        (place / "mine.toml").write_text(text.replace("PLACE", str(place)))
        (place / "evil.py").write_text("open('written', 'w').write('x')\ndef build(*a, **k): pass\n")

    return make


def _read_recipe(place: Path) -> Any:
    import tfopt

    os.chdir(place)
    sys.path.insert(0, str(place))
    found = tfopt.Recipe.from_toml(place / "mine.toml")
    if found.model != type(found.model)():
        found.model.build((4,), 2)  # as a run does
    return _checked(place, found.to_toml())


class _Calls:
    def __reduce__(self) -> Any:
        return os.system, ("touch written",)


def _npy_pickle(place: Path) -> None:
    np.save(place / "x.npy", np.array([_Calls()], dtype=object), allow_pickle=True)
    np.save(place / "y.npy", np.zeros(1))
    np.savez(place / "x.npz", x=np.array([_Calls()], dtype=object))


def _cifar_pickle(place: Path) -> None:
    content = pickle.dumps(_Calls())
    with tarfile.open(place / "cifar.tar.gz", "w:gz") as archive:
        for name in [f"data_batch_{number}" for number in range(1, 6)] + ["test_batch"]:
            entry = tarfile.TarInfo(f"cifar-10-batches-py/{name}")
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))


def _tar_outside(place: Path) -> None:
    with tarfile.open(place / "cifar.tar.gz", "w:gz") as archive:
        entry = tarfile.TarInfo("../written")
        entry.size = 1
        archive.addfile(entry, io.BytesIO(b"x"))
        link = tarfile.TarInfo("cifar-10-batches-py/data_batch_1")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)


def _read_cifar(place: Path) -> Any:
    from tfopt.data.sources.small_images import cifar10

    os.chdir(place)
    return _checked(place, cifar10(path=place / "cifar.tar.gz").name)


def _read_npy(place: Path) -> Any:
    from tfopt.data.files.numpy_files import numpy_files

    os.chdir(place)
    return _checked(place, numpy_files(x=place / "x.npy", y=place / "y.npy").name)


def _read_npz(place: Path) -> Any:
    from tfopt.cli.example_data import find_example_data

    os.chdir(place)
    return _checked(place, find_example_data(str(place / "x.npz")).arrays)


def _onnx(location: str) -> Callable[[Path], None]:
    def make(place: Path) -> None:
        import onnx
        from onnx import TensorProto, helper

        (place / "secret").write_bytes(SECRET.encode().ljust(64))
        weight = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[4, 4])
        weight.data_location = TensorProto.EXTERNAL
        for key, value in (("location", location.replace("PLACE", str(place))), ("offset", "0"), ("length", "64")):
            weight.external_data.add(key=key, value=value)
        nodes = [helper.make_node("MatMul", ["x", "w"], ["y"])]
        ends = [[helper.make_tensor_value_info(name, TensorProto.FLOAT, [None, 4])] for name in ("x", "y")]
        graph = helper.make_graph(nodes, "g", *ends, [weight])
        (place / "inner").mkdir()
        onnx.save(helper.make_model(graph), place / "inner" / "model.onnx")

    return make


def _onnx_custom(place: Path) -> None:
    import onnx
    from onnx import TensorProto, helper

    nodes = [helper.make_node("Evil", ["x"], ["y"], domain="stranger")]
    ends = [[helper.make_tensor_value_info(name, TensorProto.FLOAT, [None, 4])] for name in ("x", "y")]
    onnx.save(helper.make_model(helper.make_graph(nodes, "g", *ends)), place / "model.onnx")


def _xml(text: str) -> Callable[[Path], None]:
    def make(place: Path) -> None:
        (place / "secret").write_text(SECRET)
        (place / "model.xml").write_text(text.replace("PLACE", str(place)))

    return make


LAUGHS = "".join(f'<!ENTITY l{n} "{f"&l{n - 1};" * 10}">' for n in range(1, 12))
XML = {
    "an entity that reads a file": '<!DOCTYPE net [<!ENTITY s SYSTEM "file://PLACE/secret">]><net name="&s;">&s;</net>',
    "entities that multiply": f'<!DOCTYPE net [<!ENTITY l0 "lol">{LAUGHS}]><net name="a">&l11;</net>',
}


def _image(size: tuple[int, int], ending: str) -> Callable[[Path], None]:
    """Writes a small file whose image is huge: each pixel is the same."""

    def make(place: Path) -> None:
        from PIL import Image

        Image.MAX_IMAGE_PIXELS = None
        for name in ("cat", "dog"):
            (place / "images" / name).mkdir(parents=True)
            for number in range(3):
                Image.new("L", (8, 8)).save(place / "images" / name / f"{number}.png")
        Image.new("L", size).save(place / "images" / "cat" / f"huge.{ending}")

    return make


def _read_images(place: Path) -> Any:
    from tfopt.data.files.image_folder import image_folder
    from tfopt.data.user_data import readable

    examples = image_folder(directory=place / "images", image_size=16, test_fraction=0.4)
    with readable():
        return [x.shape for x, _ in examples.decoded("train").as_numpy_iterator()]


def _wide_table(place: Path) -> None:
    rows = "\n".join(f"{'x' * 1_000_000},{number % 2}" for number in range(10))
    (place / "table.csv").write_text(f"a,label\n{rows}\n")


def _read_table(place: Path) -> Any:
    from tfopt.data.files.tables import csv

    return csv(path=place / "table.csv", target="label").name


def _listing(files: dict[str, Any]) -> Callable[[Path], None]:
    """Writes an artifact whose manifest lists files outside of it."""

    def make(place: Path) -> None:
        import keras

        import tfopt
        from tfopt.atomic.checked_json import with_checksum

        (place / "secret").write_text(SECRET)
        tfopt.export(keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)]), place / "model")
        manifest = json.loads((place / "model" / "manifest.json").read_text())
        manifest["files"] |= {name.replace("PLACE", str(place)): value for name, value in files.items()}
        (place / "model" / "manifest.json").write_text(json.dumps(with_checksum(manifest)))

    return make


def _replace_artifact(place: Path) -> Any:
    """Exports over an artifact whose manifest claims files that are not tfopt's."""
    import keras

    import tfopt

    tfopt.export(keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)]), place / "model")
    return _checked(place, (place / "secret").stat().st_size)


def _verify(place: Path) -> Any:
    import tfopt

    return _checked(place, tfopt.verify(place / "model", seconds=0).ok)


SHARD = {"bytes": 26, "sha256": "0" * 64}
RECIPES = {
    "builder is code": 'name = "a"\n[model]\nbuilder = "evil:build"',
    "source is code": 'name = "a"\n[data]\nsource = "evil:build"',
    "task is code": 'name = "a"\ntask = "evil:build"',
    "base names a file elsewhere": 'base = "/etc/passwd"',
    "base is the secret": 'base = "PLACE/secret.toml"',
    "base is itself": 'base = "mine.toml"',
    "a service elsewhere": 'name = "a"\n[data]\nservice = "grpc://203.0.113.1:5000"',
    "export_dir is elsewhere": 'name = "a"\nexport_dir = "/etc/stranger"',
    "a checkpoint directory elsewhere": 'name = "a"\n[training]\ncheckpoint_dir = "/etc/stranger"',
    "a cache elsewhere": 'name = "a"\n[data]\ncache_dir = "/etc/stranger"',
    "arguments name a file elsewhere": 'name = "a"\n[data]\nsource = "csv"\narguments = {path = "/etc/passwd"}',
    "a name with a path": 'name = "../../etc/stranger"',
    "a name of a million characters": f'name = "{"a" * 1_000_000}"',
    "a teacher elsewhere": 'name = "a"\n[distillation]\nteacher = "/etc/passwd"',
}


def _cases() -> Iterator[tuple[str, str, Callable[[Path], None], Callable[[Path], Any], str]]:
    for how, serve in _ops().items():
        yield "a SavedModel", how, _saved_model(serve), _freeze, A_WORD
        yield "a SavedModel, inspected", how, _saved_model(serve), _inspect("model"), A_WORD
    yield "a .keras file", "a Lambda", _lambda, _load_keras, A_WORD
    for module, name in (("os", "system"), ("builtins", "eval"), ("subprocess", "Popen"), ("antigravity", "fly")):
        yield "a .keras file", f"a layer {module}.{name}", _keras_with(_class(module, name)), _load_keras, A_WORD
        yield (
            "a .keras file",
            f"an activation {module}.{name}",
            _keras_with(_function(module, name)),
            _load_keras,
            A_WORD,
        )
    yield "a .keras file", "path traversal", _zip_of({"../written": b"x", "config.json": b"{}"}), _load_keras, A_WORD
    bomb = {"config.json": b" " * 200_000_000, "metadata.json": b"{}", "model.weights.h5": b""}
    yield "a .keras file", "a zip bomb", _zip_of(bomb), _load_keras, A_WORD
    yield "a .keras file", "config nested deeply", _zip_of({"config.json": b"[" * 100_000}), _load_keras, A_WORD
    for how, text in RECIPES.items():
        yield "a recipe", how, _recipe(text), _read_recipe, HARMLESS
    yield "a .npy file", "a pickle", _npy_pickle, _read_npy, A_WORD
    yield "a .npz file", "a pickle", _npy_pickle, _read_npz, A_WORD
    yield "CIFAR's archive", "a pickle that calls", _cifar_pickle, _read_cifar, A_WORD
    yield "CIFAR's archive", "path traversal and links", _tar_outside, _read_cifar, A_WORD
    for location in ("../secret", "PLACE/secret", "../inner/../secret", "/dev/zero", "/etc/passwd", ""):
        yield "an .onnx file", f"weights in {location!r}", _onnx(location), _inspect("inner/model.onnx"), HARMLESS
    yield "an .onnx file", "an operator of its own", _onnx_custom, _inspect("model.onnx"), HARMLESS
    for how, text in XML.items():
        yield "an .xml file", how, _xml(text), _inspect("model.xml"), A_WORD
    for ending in ("png", "jpg", "bmp", "gif"):
        yield "an image", f"30,000 x 30,000 as {ending}", _image((30_000, 30_000), ending), _read_images, HARMLESS
    yield "a table", "fields of a million characters", _wide_table, _read_table, HARMLESS
    for name in ("../secret", "PLACE/secret", "/etc/passwd", "../../../../etc/passwd"):
        yield "an artifact", f"it lists {name}", _listing({name: SHARD}), _verify, A_WORD
        yield "an artifact, replaced", f"it lists {name}", _listing({name: SHARD}), _replace_artifact, HARMLESS


def faults(work: Path, *, share: float = 1.0, only: str = "") -> Iterator[Fault]:
    """Yields the files of strangers. Each is made in the trial itself, where its effect would show."""
    for number, (part, how, make, act, must) in enumerate(_cases()):
        if (not only or only in f"{KIND}: {part}") and number * share % 1 < share:
            yield Fault(kind=KIND, part=part, how=how, act=_harmless(act), spoil=make, must=must, keeps=False)
