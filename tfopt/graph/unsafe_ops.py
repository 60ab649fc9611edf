"""The ops with which a model reaches outside of itself: to files, the network, Python, or its own process.

A model is a program. TensorFlow has no mark on the ops that read files: to it, ReadFile is a plain function of a name,
which may be computed while a graph is simplified. So these ops are listed here by name. The list was made by going
through all registered ops, their inputs and their attributes; a test goes through them again.

Ops that only continue what a listed op has begun are not listed: a ReaderRead reads nothing without a TextLineReader.

A SavedModel's file is looked at before TensorFlow loads it and runs its initialisers. Two uses of files are a
SavedModel's own, and belong to it. The saver reads and writes the variables. An initialiser fills a look-up table from
a text file among the assets. So an op that restores variables is accepted where only the saver calls it and where it
reads the file that the saver is given. A table's file is accepted where its name is that of an asset. To tell, the name
is traced back: through the function's argument to each call of the function.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import tensorflow as tf
from google.protobuf.message import Error as ProtobufError
from tensorflow.core.protobuf.meta_graph_pb2 import AssetFileDef

from tfopt.atomic.files import check_utf8
from tfopt.compat.tensorflow import parse_saved_model
from tfopt.errors import ArtifactError, UnsupportedModelError
from tfopt.graph.edit import attribute, functions_of, producer, upstream

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
    op = next((op for op in (node.op, *functions_of(node)) if op in EFFECTS), None)
    return None if op is None else (op, EFFECTS[op])


def check_graph(graph_def: Any, name: str, *, trusted: bool = False) -> None:
    """Raises UnsupportedModelError if a model's graph, or a function that it calls, holds an unsafe op.

    Of a trusted model only Python functions are refused: no artifact can hold these, whoever made the model.
    """
    found = []
    bodies = [(function.signature.name, function.node_def) for function in graph_def.library.function]
    for function, nodes in [("", graph_def.node), *bodies]:
        for node in nodes:
            effect = touched(node)
            if effect is not None and (effect[1] == "Python" or not trusted):
                found.append((f"{node.name} of {function}" if function else node.name, *effect))
    refuse(found, repr(name))


def refuse(found: Iterable[tuple[str, str, str]], model: str) -> None:
    """Raises UnsupportedModelError if nodes were found; `found` has the node, its op and what this touches, of each."""
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


SAVER_WRITES = frozenset(["Save", "SaveSlices", "SaveV2", "MergeV2Checkpoints"])  # nothing runs them at load
SAVER_READS = {"Restore": 0, "RestoreSlice": 0, "RestoreV2": 0}  # with the place of the file's name among the inputs
TABLE_READS = {"InitializeTableFromTextFile": 1, "InitializeTableFromTextFileV2": 1}
CALLS = ("PartitionedCall", "StatefulPartitionedCall")
INIT = "__saved_model_init_op"
ASSET_COLLECTION = "saved_model_assets"
ASSET, SAVER, OTHER = "an asset", "the saver's file", "another file"


def check_saved_model(directory: str | Path) -> None:
    """Raises UnsupportedModelError if a SavedModel would touch files, the network, Python or its process.

    All functions of the file are looked at, those of other signatures and of initialisers too. Nothing is run. A
    directory that holds no readable SavedModel is left to TensorFlow's loader, which reads it in the same way.
    """
    check_utf8("The path of a SavedModel", directory, ArtifactError)
    try:
        saved = parse_saved_model(str(directory))
    except (OSError, UnicodeDecodeError, ProtobufError, tf.errors.OpError):
        return
    refuse(unsafe_nodes(saved, Path(directory)), str(directory))


def unsafe_nodes(saved: Any, directory: Path) -> list[tuple[str, str, str]]:
    """Returns the unsafe nodes of the protobuf of a SavedModel: of each its name, its op and what it touches."""
    return [unsafe for part in saved.meta_graphs for unsafe in _MetaGraph(part, directory).unsafe()]


class _MetaGraph:
    """The nodes of a MetaGraphDef by the function that they are in; "" is the graph itself."""

    def __init__(self, meta: Any, directory: Path) -> None:
        self.meta = meta
        self.assets = directory / "assets"
        self.inside = directory.resolve()
        functions = meta.graph_def.library.function
        self.nodes = {"": {node.name: node for node in meta.graph_def.node}}
        self.nodes |= {each.signature.name: {node.name: node for node in each.node_def} for each in functions}
        self.arguments = {each.signature.name: [arg.name for arg in each.signature.input_arg] for each in functions}
        self.fed = {producer(asset.tensor_info.name): asset.filename for asset in _assets(meta)}
        self.objects = meta.object_graph_def.nodes
        self.callable = meta.object_graph_def.concrete_functions
        self.callers: dict[str, list[tuple[str, Any]]] = {}
        for scope, nodes in self.nodes.items():
            for node in nodes.values():
                for name in self._called(node):
                    self.callers.setdefault(name, []).append((scope, node))

    def unsafe(self) -> Iterator[tuple[str, str, str]]:
        """Yields each unsafe node: its name, its op, and what it touches."""
        of_saver = self._only_of_saver()
        for scope, nodes in self.nodes.items():
            for node in nodes.values():
                effect = touched(node)
                if effect is not None and not self._belongs(scope, node, (scope, node.name) in of_saver):
                    yield (f"{node.name} of {scope}" if scope else node.name), *effect

    def _belongs(self, scope: str, node: Any, of_saver: bool) -> bool:
        if node.op in SAVER_WRITES:
            return of_saver
        for reads, allowed in ((SAVER_READS, SAVER if of_saver else None), (TABLE_READS, ASSET)):
            if node.op in reads:
                try:
                    return self._sources(scope, node.input[reads[node.op]], frozenset()) <= {allowed}
                except (IndexError, RecursionError):  # a graph that TensorFlow did not write
                    return False
        return False

    def _only_of_saver(self) -> set[tuple[str, str]]:
        """Returns the nodes that the saver needs and that nothing else needs, with the function that each is in."""
        saver = self.meta.saver_def
        ends = [name for name in (saver.save_tensor_name, saver.restore_op_name) if name]
        needed = self._needed(ends)
        used = [name for name in self.nodes[""] if name not in needed]
        for key, signature in self.meta.signature_def.items():
            used += [tensor.name for tensor in signature.outputs.values() if tensor.name or key == INIT]
            for tensor in signature.outputs.values():
                sparse = tensor.coo_sparse
                used += [part.name for part in tensor.composite_tensor.components]
                used += [sparse.values_tensor_name, sparse.indices_tensor_name, sparse.dense_shape_tensor_name]
        used += [name for each in self.meta.collection_def.values() for name in each.node_list.value]
        elsewhere = self._needed(used)
        called_elsewhere = self._functions(elsewhere, self.callable)
        # A function that nothing calls is not the saver's either.
        called_by_saver = self._functions(needed - elsewhere, ()) - called_elsewhere
        found = {("", name) for name in needed - elsewhere}
        return found | {(function, name) for function in called_by_saver for name in self.nodes[function]}

    def _needed(self, tensors: Iterable[str]) -> set[str]:
        """Returns the nodes of the graph itself that tensors are computed from or wait for."""
        return upstream(self.nodes[""], tensors, control=True)

    def _functions(self, nodes: Collection[str], named: Iterable[str]) -> set[str]:
        """Returns the functions that nodes of the graph itself call, the named ones, and all that these call."""
        waiting = [name for node in nodes for name in self._called(self.nodes[""][node])]
        waiting += [name for name in named if name in self.arguments]
        found = set[str]()
        while waiting:
            name = waiting.pop()
            if name not in found:
                found.add(name)
                waiting += [other for node in self.nodes[name].values() for other in self._called(node)]
        return found

    def _called(self, node: Any) -> set[str]:
        return {name for name in (node.op, *functions_of(node)) if name in self.arguments}

    def _sources(self, scope: str, tensor: str, seen: frozenset[tuple[str, str]]) -> set[str | None]:
        """Returns where the name of a file comes from: ASSET, SAVER or OTHER, for each way to the op."""
        name = producer(tensor)
        if (scope, name) in seen:
            return {OTHER}
        seen |= {(scope, name)}
        node = self.nodes[scope].get(name)
        if node is None:
            return self._sources_of_argument(scope, name, seen)
        if scope == "":
            if name in self.fed:
                return {self._kind_of(self.fed[name])}
            if name == producer(self.meta.saver_def.filename_tensor_name):
                return {SAVER}
        if node.op == "Identity":
            return self._sources(scope, node.input[0], seen)
        if node.op == "ReadVariableOp" and scope == "":  # TensorFlow keeps the name of an asset in a variable
            writes = [each for each in self.nodes[""].values() if each.op == "AssignVariableOp"]
            own = [each for each in writes if producer(each.input[0]) == producer(node.input[0])]
            return {kind for each in own for kind in self._sources("", each.input[1], seen)} or {OTHER}
        return {OTHER}

    def _sources_of_argument(self, function: str, name: str, seen: frozenset[tuple[str, str]]) -> set[str | None]:
        arguments = self.arguments.get(function, [])
        if name not in arguments:
            return {OTHER}
        place, kinds = arguments.index(name), set[str | None]()
        for scope, node in self.callers.get(function, ()):
            direct = node.op == function or node.op in CALLS
            kinds |= self._sources(scope, node.input[place], seen) if direct else {OTHER}
        if function in self.callable:
            captured = list(self.callable[function].bound_inputs)
            number = place - (len(arguments) - len(captured))
            held = self.objects[captured[number]] if number >= 0 else None
            if held is not None and held.WhichOneof("kind") == "asset":
                kinds.add(self._kind_of(self.meta.asset_file_def[held.asset.asset_file_def_index].filename))
            else:
                kinds.add(OTHER)
        return kinds

    def _kind_of(self, asset: str) -> str:
        """An asset's name may lead out of the SavedModel, as ../../secret or by a link."""
        return ASSET if (self.assets / asset).resolve().is_relative_to(self.inside) else OTHER


def _assets(meta: Any) -> list[Any]:
    """Returns the assets as the loader finds them: TensorFlow 1 lists them in a collection."""
    packed = [] if meta.asset_file_def else meta.collection_def[ASSET_COLLECTION].any_list.value
    return [*meta.asset_file_def, *(AssetFileDef.FromString(each.value) for each in packed)]
