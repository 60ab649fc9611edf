"""The ops with which a model reaches outside of itself: to files, the network, Python, or its own process.

A model is a program. TensorFlow has no mark on the ops that read files: to it, ReadFile is a plain function of a name,
which may be computed while a graph is simplified. So these ops are listed here by name. The list was made by going
through all registered ops, their inputs and their attributes; a test goes through them again.

Ops that only continue what a listed op has begun are not listed: a ReaderRead reads nothing without a TextLineReader.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tfopt.errors import UnsupportedModelError
from tfopt.graph.edit import attribute

# What the ops touch, and the names of the ops.
NAMES = {
    "files": """
        ReadFile WriteFile MatchingFiles ImmutableConst FileSystemSetConfiguration
        Save SaveSlices SaveV2 Restore RestoreSlice RestoreV2 DTensorRestoreV2 DistributedSave MergeV2Checkpoints
        LoadAndRemapMatrix GenerateVocabRemapping FixedUnigramCandidateSampler Skipgram
        InitializeTableFromTextFile InitializeTableFromTextFileV2
        FixedLengthRecordReader FixedLengthRecordReaderV2 LMDBReader TFRecordReader TFRecordReaderV2
        TextLineReader TextLineReaderV2 WholeFileReader WholeFileReaderV2 RecordInput
        CSVDataset CSVDatasetV2 ExperimentalCSVDataset FixedLengthRecordDataset FixedLengthRecordDatasetV2
        LMDBDataset ExperimentalLMDBDataset SqlDataset ExperimentalSqlDataset TextLineDataset
        TFRecordDataset TFRecordDatasetV2 MatchingFilesDataset ExperimentalMatchingFilesDataset
        CacheDataset CacheDatasetV2 LoadDataset SaveDataset SaveDatasetV2 ListSnapshotChunksDataset
        SnapshotDataset SnapshotDatasetV2 SnapshotChunkDataset SnapshotDatasetReader SnapshotNestedDatasetReader
        DatasetToTFRecord ExperimentalDatasetToTFRecord
        CreateSummaryDbWriter CreateSummaryFileWriter CalibrationStatisticsSaver DumpTensor
        DebugIdentity DebugIdentityV2 DebugIdentityV3 DebugNanCount DebugNumericSummary DebugNumericSummaryV2
    """,
    "the network": """
        DataServiceDataset DataServiceDatasetV2 DataServiceDatasetV3 DataServiceDatasetV4
        RegisterDataset RegisterDatasetV2
        RpcCall RpcCheckStatus RpcClient RpcGetValue RpcServer RpcServerRegister RpcServerStart RemoteCall
    """,
    "Python": "PyFunc PyFuncStateless EagerPyFunc",
    # They end the process, call native code by its name, or run a graph that is hidden in a string.
    "its process": """
        Abort XlaCustomCall XlaCustomCallV2 DatasetFromGraph DeserializeIterator MlirPassthroughOp _TPUCompileMlir
        _XlaHostComputeMlir
    """,
}
EFFECTS = {op: what for what, ops in NAMES.items() for op in ops.split()}


def touched(node: Any) -> tuple[str, str] | None:
    """Returns the op with which a node reaches outside of the model, and what it touches; None for most nodes.

    Example:
        >>> from tfopt.graph.edit import NodeDef
        >>> touched(NodeDef(op="ReadFile")), touched(NodeDef(op="MatMul"))
        (('ReadFile', 'files'), None)
    """
    if node.op == "PrintV2":  # it prints to standard error unless it names a file
        return ("PrintV2", "files") if attribute(node, "output_stream").s.startswith(b"file:") else None
    functions = (function.name for value in node.attr.values() for function in (value.func, *value.list.func))
    op = next((op for op in (node.op, *functions) if op in EFFECTS), None)
    return None if op is None else (op, EFFECTS[op])


def check_graph(graph_def: Any, name: str, *, trusted: bool = False) -> None:
    """Raises UnsupportedModelError if a model's graph, or a function that it calls, holds an unsafe op.

    Args:
        graph_def: The graph with its functions.
        name: The model's name, for the error.
        trusted: Whether only Python functions are refused. No artifact can hold these, whoever made the model.
    """
    found = []
    for function, nodes in _bodies(graph_def):
        for node in nodes:
            effect = touched(node)
            if effect is not None and (effect[1] == "Python" or not trusted):
                found.append((f"{node.name} of {function}" if function else node.name, *effect))
    refuse(found, repr(name))


def refuse(found: Iterable[tuple[str, str, str]], model: str) -> None:
    """Raises UnsupportedModelError if nodes were found.

    Args:
        found: The node, its op and what this touches, of each.
        model: The model, as the error names it.
    """
    found = list(dict.fromkeys(found))
    if not found:
        return
    shown = "; ".join(f"{op} at {node!r} touches {what}" for node, op, what in found[:3])
    more = f"; and {len(found) - 3} more" if len(found) > 3 else ""
    if any(what == "Python" for _, _, what in found):
        raise UnsupportedModelError(
            f"A model must be made of TensorFlow's ops alone to be served. Received: {model} ({shown}{more}). A Python "
            "function exists in its own process only: write it with ops of Keras or TensorFlow, or keep it outside of "
            "the model."
        )
    raise UnsupportedModelError(
        "A model must not reach files, the network or its process when it runs. "
        f"Received: {model} ({shown}{more}). Keep this outside of the model. If you trust the model's source, pass "
        "trusted=True (--trusted)."
    )


def _bodies(graph_def: Any) -> Iterable[tuple[str, Iterable[Any]]]:
    yield "", graph_def.node
    yield from ((function.signature.name, function.node_def) for function in graph_def.library.function)
