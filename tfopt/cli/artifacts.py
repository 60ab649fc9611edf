"""The commands for artifacts and reports: `tfopt export`, `verify`, `inspect`, `publish` and `report`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from tfopt.cli.bench import share_in
from tfopt.cli.exit_codes import CHECK_FAILED, SUCCESS, CheckError
from tfopt.cli.preparation import start_tensorflow
from tfopt.cli.printing import print_json, say
from tfopt.errors import ArtifactError, ConfigError
from tfopt.settings.flags import parse
from tfopt.terminal import working


@dataclass(frozen=True, kw_only=True)
class VerifyOptions:
    """Measures an exported artifact in a fresh process that imports only what runs its format."""

    artifact: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="DIR")]
    """Directory of the artifact."""
    baseline: str | None = None
    """Directory of the float artifact to compare with. The manifest names the default."""
    data: str | None = None
    """Labelled examples for the score: a .npz file with x and y, the name of a data source, or a recipe (name or .toml
    file) with its source and task. Of a source, the test part is taken."""
    task: str | None = None
    """Task whose score is computed on the examples: classification, multi_label_classification, segmentation,
    language_model or regression, or package.module:name of your own. By default the task of the recipe, otherwise
    classification."""
    metric: str | None = None
    """Score to compute on the examples, instead of the task's. "accuracy" finds out the kind of classifier.
    "categorical_accuracy", "binary_accuracy" (for probabilities) and "binary_accuracy_from_logits" name the kind.
    "mean_iou", "bits_per_byte" and "mean_absolute_error" are for other tasks."""
    batch_size: int = 1
    """Number of examples in each timed call."""
    seconds: float = 0.3
    """How long the artifact and the baseline are each timed in one of five rounds."""
    threads: tuple[int, ...] = ()
    """Numbers of intra-op threads to compare, for example 1 16. The receipt then has the best number for calls of one
    example and of batch-size, or 8, and advice with the flags of servers. By default none are compared."""
    signature: str | None = None
    """Signature to call, for example serving_float. By default serving_default, if TensorFlow can run it here."""
    gate: str | None = None
    """Least share of the baseline's score, for example 99%. Less fails the verification. It needs --data."""
    trusted: bool = False
    """Run an artifact that touches files or the network. Without it, such an artifact is refused before it runs."""
    json: bool = False
    """Print JSON."""


@dataclass(frozen=True, kw_only=True)
class InspectOptions:
    """Shows what a model file holds: inputs and outputs, operators by type, parameters, multiply-adds, largest layers.

    Of an artifact also which nodes are in int8 and which are in float, and why. Nothing of the model runs.
    """

    path: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="DIR|FILE")]
    """Directory of an artifact or of a SavedModel, or an .onnx, .tflite or .xml file (of OpenVINO)."""
    open_size: int = 128
    """What an open size other than the batch counts as, such as the length of a sequence. The batch is one example."""
    json: bool = False
    """Print JSON."""


@dataclass(frozen=True, kw_only=True)
class PublishOptions:
    """Copies an artifact into a model repository for servers, as a new version. Earlier versions stay.

    A SavedModel is for TensorFlow Serving, an ONNX file for OpenVINO Model Server and Triton.
    """

    artifact: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="DIR")]
    """Directory of the artifact."""
    repository: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="REPOSITORY")]
    """Directory of the model repository. It is made if needed."""
    name: str | None = None
    """Name by which clients call the model. By default the name of the artifact's directory."""
    version: int | None = None
    """Number of the version. By default the next one after the largest number."""
    batch_sizes: tuple[int, ...] | None = None
    """Numbers of examples in the requests that warm the model up. The largest is the most that Triton joins. By default
    1, 8 and the batch that was measured to be best."""
    warm_up: bool = True
    """Write requests that warm the model up. Of a SavedModel they need the extra serving."""
    any_machine: bool = False
    """Use what tfopt tune measured on another machine: for servers that are like that machine."""
    json: bool = False
    """Print JSON."""


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """Writes the HTML page of a saved report again, or one page that compares several runs.

    A directory must hold report.json of `tfopt run`, diagnosis.json or utilization.json.
    """

    directories: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="DIR")]
    """Directories of the reports. The first run is the one that the others are compared with."""
    out: str | None = None
    """The HTML file. By default DIR/report.html for one directory, and comparison.html for several."""
    json: bool = False
    """Print the report or the comparison as JSON, and write a page only with --out."""


def export_command(words: list[str]) -> int:
    from tfopt.exporting.config import ExportOptions

    options = parse(ExportOptions, words, "tfopt export")
    given = {word.split("=")[0] for word in words}
    if "--formats" in given and (not options.formats or "--format" in given):
        raise ConfigError(
            "formats must name at least one format, and --format must not be given with it. Received: "
            f"{' '.join(sorted(given & {'--format', '--formats'}))}. Pass for example --formats onnx litert."
        )
    start_tensorflow()
    from tfopt.atomic.directories import MARK
    from tfopt.cli.example_data import find_example_data
    from tfopt.exporting import export, export_formats

    calibration = (
        None if options.calibration_data is None else find_example_data(options.calibration_data).part("train")
    )
    labelled = None if options.evaluation_data is None else find_example_data(options.evaluation_data).part("test")
    baseline = options.baseline
    in_place = Path(options.source).resolve() == Path(options.out).resolve()
    if baseline is None and options.precision != "float32" and Path(options.source, MARK).is_file() and not in_place:
        baseline = options.source
    data = {"calibration_data": calibration, "evaluation_data": labelled, "baseline": baseline}
    with working(f"exporting {options.source} as {options.precision}"):
        if options.formats:
            artifacts = export_formats(options.source, options.out, options.formats, options, **data)
        else:
            artifacts = {options.format: export(options.source, options.out, options, **data)}
    if options.json:
        found = {name: artifact.to_dict() for name, artifact in artifacts.items()}
        print_json(found if options.formats else found[options.format])
        return SUCCESS
    for artifact in artifacts.values():
        if artifact.report is not None:
            say(artifact.report)
        say(f"exported {artifact.path}, {artifact.computes}, {artifact.bytes_on_disk:,} bytes")
    return SUCCESS


def verify_command(words: list[str]) -> int:
    options = parse(VerifyOptions, words, "tfopt verify")
    start_tensorflow()
    from tfopt.cli.example_data import ExampleData, find_example_data
    from tfopt.exporting import verify
    from tfopt.exporting.manifest import check_is_artifact

    check_is_artifact(Path(options.artifact))  # a directory that is no artifact is wrong use, not a failed check
    given = ExampleData() if options.data is None else find_example_data(options.data)
    metric = given.metric(options.metric, options.task)
    try:
        with working(f"measuring {options.artifact} in a fresh process") as now:
            receipt = verify(
                options.artifact,
                baseline=options.baseline,
                data=given.part("test"),
                metric=metric,
                batch_size=options.batch_size,
                seconds=options.seconds,
                threads=options.threads,
                signature=options.signature,
                gate=None if options.gate is None else share_in(options.gate),
                trusted=options.trusted,
                on_step=now,
            )
    except ArtifactError as error:
        raise CheckError(error) from error
    say(receipt.to_json() if options.json else receipt)
    return SUCCESS if receipt.ok else CHECK_FAILED


def inspect_command(words: list[str]) -> int:
    options = parse(InspectOptions, words, "tfopt inspect")
    start_tensorflow()
    from tfopt.atomic.directories import MARK
    from tfopt.exporting import inspect

    try:
        inspection = inspect(options.path, open_size=options.open_size)
    except ArtifactError as error:
        if Path(options.path, MARK).is_file():  # it was an artifact, and is damaged
            raise CheckError(error) from error
        raise
    say(inspection.to_json() if options.json else inspection)
    return CHECK_FAILED if inspection.problems else SUCCESS


def publish_command(words: list[str]) -> int:
    options = parse(PublishOptions, words, "tfopt publish")
    start_tensorflow()
    from tfopt.atomic.directories import MARK
    from tfopt.exporting import publish

    with working(f"publishing {options.artifact}"):
        try:
            published = publish(
                options.artifact,
                options.repository,
                name=options.name,
                version=options.version,
                batch_sizes=options.batch_sizes,
                warm_up=options.warm_up,
                any_machine=options.any_machine,
            )
        except ArtifactError as error:
            if Path(options.artifact, MARK).is_file():  # it was an artifact, and is damaged
                raise CheckError(error) from error
            raise
    if options.json:
        print_json(published.to_dict())
        return SUCCESS
    say(published.report)
    say(f"published {published.path}")
    return SUCCESS


def report_command(words: list[str]) -> int:
    options = parse(ReportOptions, words, "tfopt report")
    if not options.directories:
        raise ConfigError("tfopt report needs at least one directory. Received: none. Write tfopt report DIR.")
    from tfopt.reporting.comparison import compare, write_comparison_html
    from tfopt.reporting.html_page import write_html
    from tfopt.reporting.saved_report import load_report

    reports = {name: load_report(directory) for name, directory in _names(options.directories).items()}
    first = next(iter(reports.values()))
    out = None if options.out is None else Path(options.out)
    if out is not None and not out.parent.is_dir():
        raise ConfigError(f"out must lie in an existing directory. Received: out={options.out!r}. Make {out.parent}.")
    if options.json:
        say((first if len(reports) == 1 else compare(reports)).to_json())
        if out is None:
            return SUCCESS
    if len(reports) == 1:
        page = write_html(first, out or Path(options.directories[0]) / "report.html")
    else:
        page = write_comparison_html(reports, out or Path("comparison.html"))
    if not options.json:
        say(f"report: {page}")
    return SUCCESS


def _names(directories: tuple[str, ...]) -> dict[str, str]:
    """Returns a name for each directory: its last part, or the whole path where the last parts are the same."""
    last = [Path(directory).resolve().name for directory in directories]
    names = list(last) if len(set(last)) == len(last) else list(directories)
    if len(set(names)) < len(names):
        raise ConfigError(f"Each directory must be given once. Received: {' '.join(directories)}. Leave one out.")
    return dict(zip(names, directories, strict=True))
