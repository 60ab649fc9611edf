"""`tfopt.inspect` counts the products of runtimes' own operators, or names their kinds, and knows packed weights."""

import flatbuffers
import numpy as np
import onnx
import openvino
import pytest
import tensorflow as tf
from ai_edge_litert import schema_py_generated as schema
from onnx import TensorProto, helper
from openvino import opset13

from tfopt.errors import ArtifactError
from tfopt.exporting import inspect

MICROSOFT = "com.microsoft"


def value(name, shape, kind=TensorProto.FLOAT):
    return helper.make_tensor_value_info(name, kind, shape)


def held(name, shape, kind=TensorProto.FLOAT):
    return helper.make_tensor(name, kind, shape, np.ones(shape).reshape(-1).astype(int))


def inspected(path, nodes, inputs, weights=(), functions=()):
    """Returns what is found in an ONNX file of nodes, whose last one gives the result."""
    graph = helper.make_graph(nodes, "g", inputs, [value(nodes[-1].output[0], None)], weights)
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid(MICROSOFT, 1), helper.make_opsetid("own", 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, functions=functions), path / "model.onnx")
    return inspect(path / "model.onnx")


def heads(features):
    return [value(name, (1, 2, steps, size)) for name, steps, size in zip("qkv", (7, 9, 9), features, strict=True)]


GRID = [held("s", ()), held("z", (), TensorProto.INT8)]
ONNX = {
    "QGemm": (
        helper.make_node("QGemm", ["x", "s", "z", "w", "s", "z"], ["y"], domain=MICROSOFT, transB=1),
        [value("x", (4, 8), TensorProto.INT8)],
        [*GRID, held("w", (6, 8), TensorProto.INT8)],
        4 * 8 * 6,
    ),
    "MatMulNBits": (
        helper.make_node("MatMulNBits", ["x", "w", "s"], ["y"], domain=MICROSOFT, K=32, N=6, bits=4, block_size=32),
        [value("x", (4, 5, 32))],
        [held("w", (6, 1, 16), TensorProto.UINT8), held("s", (6,))],
        4 * 5 * 32 * 6,
    ),
    "Attention": (helper.make_node("Attention", list("qkv"), ["y"]), heads((16, 16, 8)), [], 2 * 7 * 9 * (16 + 8)),
    "Microsoft's": (
        helper.make_node("Attention", ["x", "w"], ["y"], domain=MICROSOFT, num_heads=2),
        [value("x", (3, 5, 16))],
        [held("w", (16, 24))],
        3 * 5 * 16 * 24 + 3 * 5 * 5 * (8 + 8),
    ),
    "QAttention": (
        helper.make_node("QAttention", ["x", "w"], ["y"], domain=MICROSOFT, num_heads=2),
        [value("x", (3, 5, 16))],
        [held("w", (16, 24))],
        None,
    ),
    "FastGelu": (helper.make_node("FastGelu", ["x"], ["y"], domain=MICROSOFT), [value("x", (3, 5))], [], 0),
}


@pytest.mark.parametrize("name", ONNX)
def test_operators_of_onnx_runtime_count_or_are_named(name, tmp_path):
    node, inputs, weights, expected = ONNX[name]
    found = inspected(tmp_path, [node], inputs, weights)
    assert [each.multiply_adds for each in found.operators] == [expected]
    assert found.not_counted == found.to_dict()["not_counted"] == ([] if expected is not None else ["QAttention"])
    assert ("not counted" in str(found)) == (expected is None)


def test_functions_count_as_what_they_hold_unless_they_fill_the_memory(tmp_path):
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid("own", 1)]
    product = helper.make_node("MatMul", ["a", "b"], ["c"])
    function = helper.make_function("own", "Product", ["a", "b"], ["c"], [product], opsets)
    calls = [
        helper.make_node("Product", ["x", "w"], ["y"], domain="own"),
        helper.make_node("Product", ["y", "w"], ["z"], domain="own"),
    ]
    found = inspected(tmp_path, calls, [value("x", (4, 8))], [held("w", (8, 8))], [function])
    assert found.multiply_adds == 2 * 4 * 8 * 8
    twice = [
        helper.make_function(
            "own",
            f"F{number}",
            ["a"],
            ["c"],
            [
                helper.make_node(f"F{number + 1}", [source], [result], domain="own")
                for source, result in (("a", "b"), ("b", "c"))
            ]
            if number < 39
            else [helper.make_node("Relu", ["a"], ["c"])],
            opsets,
        )
        for number in range(40)
    ]
    with pytest.raises(ArtifactError, match="functions hold more than 1,000,000 nodes"):
        inspected(tmp_path, [helper.make_node("F0", ["x"], ["y"], domain="own")], [value("x", (4, 8))], [], twice)


@pytest.mark.parametrize(("trips", "rounds"), [(5, 5), (2**63 - 1, 1)])
def test_a_loop_without_a_limit_counts_one_round(trips, rounds, tmp_path):
    body = helper.make_graph(
        [helper.make_node("MatMul", ["before", "w"], ["after"]), helper.make_node("Identity", ["go"], ["still"])],
        "body",
        [value("i", (), TensorProto.INT64), value("go", (), TensorProto.BOOL), value("before", (4, 8))],
        [value("still", (), TensorProto.BOOL), value("after", (4, 8))],
    )
    limit = helper.make_tensor("limit", TensorProto.INT64, (), [trips])
    loop = helper.make_node("Loop", ["limit", "", "x"], ["y"], name="loop", body=body)
    found = inspected(tmp_path, [loop], [value("x", (4, 8))], [limit, held("w", (8, 8))])
    assert found.multiply_adds == rounds * 4 * 8 * 8
    assert found.open_loops == (("loop",) if rounds == 1 else ())
    assert ("at least 256 for x [4, 8]; one round counts of loop" in str(found)) == (rounds == 1)


def counted(step=("Add", 2), limit=("const", 7.0), compares="next", begins=1, trips=None):
    """Returns an ONNX loop with a counter, a carried matrix and a sequence of results, and its constants."""
    int64, boolean = TensorProto.INT64, TensorProto.BOOL
    compared = {"next": "next", "own": "i"}[compares]
    nodes = [
        helper.make_node(step[0], ["i", "step"], ["next"]),
        helper.make_node("Cast", [compared], ["cast"], to=TensorProto.FLOAT),
        helper.make_node("Less", ["cast", {"const": "limit", "carried": "n", "changed": "n"}[limit[0]]], ["less"]),
        helper.make_node("And", ["less", "yes"], ["go"]),
        helper.make_node("MatMul", ["x", "w"], ["y"]),
        helper.make_node("Neg" if limit[0] == "changed" else "Identity", ["n"], ["m"]),
        helper.make_node("Identity", ["y"], ["kept"]),
    ]
    carried = [value("i", (), int64), value("x", ("open", 8)), value("n", ())]
    body = helper.make_graph(
        nodes, "body", [value("round", (), int64), value("was", (), boolean), *carried],
        [value("go", (), boolean), value("next", (), int64), value("y", None), value("m", ()), value("kept", None)],
    )  # fmt: skip
    constants = [
        helper.make_tensor("zero", int64, (), [0]), helper.make_tensor("step", int64, (), [step[1]]),
        helper.make_tensor("limit", TensorProto.FLOAT, (), [limit[1]]), helper.make_tensor("yes", boolean, (), [True]),
        helper.make_tensor("begins", boolean, (), [begins]), helper.make_tensor("trips", int64, (), [trips or 0]),
        held("w", (8, 8)), held("w2", (8, 3)),
    ]  # fmt: skip
    given = ["trips" if trips else "", "begins", "zero", "a", "limit"]
    loop = helper.make_node("Loop", given, ["end", "last", "bound", "all"], name="loop", body=body)
    behind = [helper.make_node("MatMul", [name, "w2"], [f"of_{name}"]) for name in ("last", "all")]
    return [loop, *behind], constants


@pytest.mark.parametrize(
    ("settings", "rounds"),
    [
        ({}, 4),
        ({"limit": ("const", 7.5)}, 4),
        ({"limit": ("carried", 6.0)}, 3),
        ({"limit": ("changed", 6.0)}, None),
        ({"compares": "own"}, 5),
        ({"step": ("Add", -1)}, None),
        ({"step": ("Mul", 2)}, None),
        ({"begins": 0}, 0),
        ({"trips": 3}, 3),
        ({"trips": 9}, 4),
        ({"limit": ("const", -5.0)}, 1),  # it is compared after the first round
    ],
)
def test_a_loop_of_onnx_counts_the_rounds_of_its_counter_with_what_it_carries(settings, rounds, tmp_path):
    nodes, constants = counted(**settings)
    found = inspected(tmp_path, nodes, [value("a", (4, 8))], constants)
    one, last, sequence = 4 * 8 * 8, 4 * 8 * 3, 4 * 8 * 3
    if rounds is None:
        assert found.open_loops == ("loop",)
        assert [each.name for each in found.uncounted] == ["of_all"]  # a sequence of unknown length
        assert found.multiply_adds == one + last
    else:
        assert (found.open_loops, found.uncounted) == ((), [])
        assert found.multiply_adds == rounds * (one + sequence) + last


def test_products_of_what_grows_in_a_loop_of_onnx_are_unknown(tmp_path):
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["y"]), helper.make_node("Concat", ["y", "x"], ["longer"], axis=0),
        helper.make_node("MatMul", ["fixed", "w"], ["kept"]), helper.make_node("Identity", ["was"], ["go"]),
    ]  # fmt: skip
    sizes = [value("x", ("open", 8)), value("fixed", ("open", 8))]
    body = helper.make_graph(
        nodes, "body", [value("round", (), TensorProto.INT64), value("was", (), TensorProto.BOOL), *sizes],
        [value("go", (), TensorProto.BOOL), value("longer", None), value("kept", None)],
    )  # fmt: skip
    loop = helper.make_node("Loop", ["trips", "", "a", "a"], ["all", "last"], name="loop", body=body)
    trips = helper.make_tensor("trips", TensorProto.INT64, (), [3])
    found = inspected(tmp_path, [loop], [value("a", (4, 8))], [trips, held("w", (8, 8))])
    assert [each.name for each in found.uncounted] == ["y"]
    assert found.multiply_adds == 3 * 4 * 8 * 8


def test_a_condition_that_is_a_circle_or_a_thousand_paths_ends(tmp_path):
    nodes, constants = counted()
    body = nodes[0].attribute[0].g
    ands = [helper.make_node("And", [f"and{place}"] * 2, [f"and{place + 1}"]) for place in range(60)]
    circle = [helper.make_node("Identity", ["and60"], ["and0"]), helper.make_node("Identity", ["self"], ["self"])]
    body.node.extend([*ands, *circle, helper.make_node("And", ["and60", "self"], ["circle"])])
    body.output[0].name = "circle"
    loop, *_ = nodes
    assert inspected(tmp_path, [loop], [value("a", (4, 8))], constants).open_loops == ("loop",)


def product(x):
    return tf.matmul(x, tf.ones((4, 4)))


LOOPS = {
    "from 2 by 3": (lambda x: tf.while_loop(lambda i, _: i < 10, lambda i, x: (i + 3, product(x)), (2, x))[1], 3),
    "until its values are large": (
        lambda x: tf.while_loop(lambda x: tf.reduce_sum(x) < 9.0, lambda x: [product(x)], [x])[0],
        None,
    ),
    "to a limit that changes": (
        lambda x: tf.while_loop(lambda i, n, _: i < n, lambda i, n, x: (i + 1, n - 1, product(x)), (0, 8, x))[2],
        None,
    ),
    "never": (lambda x: tf.while_loop(lambda i, _: i < 3, lambda i, x: (i + 1, product(x)), (3, x))[1], 0),
    "by factors": (lambda x: tf.while_loop(lambda i, _: i < 10, lambda i, x: (i * 2, product(x)), (1, x))[1], None),
}


@pytest.mark.parametrize("name", LOOPS)
def test_loops_count_the_rounds_of_their_counter_or_one(name, tmp_path):
    loop, rounds = LOOPS[name]
    module = tf.Module()
    concrete = tf.function(lambda x: {"y": loop(x)}).get_concrete_function(tf.TensorSpec((2, 4), name="x"))
    tf.saved_model.save(module, str(tmp_path / "model"), signatures=concrete)
    written = tf.lite.TFLiteConverter.from_concrete_functions([concrete], module).convert()
    (tmp_path / "model.tflite").write_bytes(written)
    for file in ("model", "model.tflite"):
        found = inspect(tmp_path / file)
        assert (found.multiply_adds, found.uncounted) == (2 * 4 * 4 * (1 if rounds is None else rounds), [])
        assert len(found.open_loops) == (rounds is None)
        assert ("at least 32 for x [2, 4]; one round counts of" in " ".join(str(found).split())) == (rounds is None)


def test_values_of_four_bits_take_half_a_byte(tmp_path):
    weights = [held("w", (8, 7), TensorProto.INT4), held("s", ())]
    nodes = [
        helper.make_node("DequantizeLinear", ["w", "s"], ["d"]),
        helper.make_node("MatMul", ["x", "d"], ["y"]),
    ]
    (weight,) = inspected(tmp_path, nodes, [value("x", (4, 8))], weights).weights
    assert (weight.dtype, weight.count, weight.size_bytes, weight.zeros) == ("int4", 56, 28, 0)


def test_openvinos_small_floats_and_its_attention_count(tmp_path):
    q, k, v = (opset13.parameter((1, 2, steps, 16), np.float32) for steps in (7, 9, 9))
    attended = opset13.scaled_dot_product_attention(q, k, v)
    for kind in (openvino.Type.nf4, openvino.Type.f8e4m3):
        weights = opset13.convert(opset13.constant(np.ones((16, 5), np.float32), dtype=kind), np.float32)
        scaled = opset13.multiply(weights, opset13.constant(np.ones((1, 5), np.float32)))
        model = openvino.Model([opset13.matmul(attended, scaled, False, False)], [q, k, v])
        openvino.save_model(model, tmp_path / "model.xml", compress_to_fp16=False)
        found = inspect(tmp_path / "model.xml")
        assert found.multiply_adds == 2 * 7 * 9 * (16 + 16) + 2 * 7 * 16 * 5
        assert [(each.dtype, each.size_bytes) for each in found.weights] == [
            ("nf4", 40) if kind == openvino.Type.nf4 else ("float8e4m3", 80)
        ]


def test_an_svdf_of_litert_counts_and_its_custom_operators_do_not(tmp_path):
    shapes = [(1, 10), (4, 10), (4, 3), (1, 12), (1, 4), (1, 4)]
    tensors = [
        schema.TensorT(name=f"t{place}", shape=list(shape), type=0, buffer=1 if place in (1, 2) else 0)
        for place, shape in enumerate(shapes)
    ]
    operators = [
        schema.OperatorT(opcodeIndex=0, inputs=[0, 1, 2, -1, 3], outputs=[4]),
        schema.OperatorT(opcodeIndex=1, inputs=[4], outputs=[5]),
    ]
    codes = [
        schema.OperatorCodeT(deprecatedBuiltinCode=each, builtinCode=each, customCode=code)
        for each, code in ((schema.BuiltinOperator.SVDF, None), (schema.BuiltinOperator.CUSTOM, "Own"))
    ]
    graph = schema.SubGraphT(tensors=tensors, inputs=[0, 3], outputs=[5], operators=operators)
    buffers = [schema.BufferT(), schema.BufferT(data=list(np.ones(40, np.float32).tobytes()))]
    model = schema.ModelT(version=3, operatorCodes=codes, subgraphs=[graph], buffers=buffers)
    tensors[2].buffer = 2
    buffers.append(schema.BufferT(data=list(np.ones(12, np.float32).tobytes())))
    builder = flatbuffers.Builder(1024)
    builder.Finish(model.Pack(builder), b"TFL3")
    (tmp_path / "model.tflite").write_bytes(builder.Output())
    found = inspect(tmp_path / "model.tflite")
    assert found.multiply_adds == 4 * 10 + 4 * 3
    assert found.not_counted == ["CUSTOM(Own)"]


def test_a_product_of_tensorflow_without_a_formula_is_named(tmp_path):
    module = tf.Module()
    serve = tf.function(lambda x: {"y": tf.raw_ops.SparseMatMul(a=x, b=tf.ones((4, 4)))})
    tf.saved_model.save(module, str(tmp_path), signatures=serve.get_concrete_function(tf.TensorSpec((3, 4), name="x")))
    assert inspect(tmp_path).not_counted == ["SparseMatMul"]


def test_a_scale_behind_a_float_difference_is_a_parameter_of_openvino(tmp_path):
    x = opset13.parameter([1, 4], np.float32)
    means, scales = (opset13.constant(np.arange(1, 5, dtype=np.float32)[None] * each) for each in (1, 2))
    model = openvino.Model([opset13.multiply(opset13.subtract(x, means), scales)], [x])
    openvino.save_model(model, tmp_path / "model.xml", compress_to_fp16=False)
    assert inspect(tmp_path / "model.xml").parameters == 8
