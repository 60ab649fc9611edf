"""The measured tables of efficiency: estimates of one GPU, of this machine and of several GPUs, and their errors."""

from __future__ import annotations

from page_tables import markdown, read


def published() -> str:
    results = read("advisor")
    rows = [
        [
            f"{run['model']}, {run['tokens']} tokens" if "tokens" in run else run["model"],
            run["card"],
            run["precision"],
            str(run["batch"]),
            f"{run['published_examples_per_s']:,g}",
            f"{run['published_tflops']:g}",
            f"{run['estimated_examples_per_s']:,g}",
            f"{run['memory_bound_share']:.0%}",
            f"{run['error']:+.0%}{' (fitted)' if run['fitted'] else ''}",
        ]
        for run in results["published"]
    ]
    head = ["model", "GPU", "precision", "batch", "published examples/s", "TFLOP/s", "estimated", "memory", "error"]
    fitted = errors("The error of the fitted rows", results["published_error"])
    other = errors("The error of the others", results["independent_error"])
    return f"{markdown([head, *rows])}\n\n{fitted} {other} Source: NVIDIA DeepLearningExamples."


def here() -> str:
    results = read("advisor")
    rows = [
        [name, f"{cell['measured_ms']:.3g} ms", f"{cell['estimated_ms']:.3g} ms", f"{cell['error']:+.0%}"]
        for name, cell in results["here"].items()
    ]
    text = markdown([["recipe", "measured", "estimated", "error"], *rows])
    device = results["device"]
    return f"{text}\n\n{errors(f'The error on {device}', results['here_error'])}"


def shared_cores() -> str:
    results = read("scaling")
    rows = [
        [
            cell["model"],
            f"{cell['replicas']} {cell['how']}",
            f"{cell['one_device_ms']:.3g} ms",
            f"{cell['measured_ms']:.3g} ms",
            f"{cell['predicted_ms']:.3g} ms",
            f"{cell['error']:+.0%}",
        ]
        for cell in results["here"]
    ]
    text = markdown([["model", "replicas", "one device", "measured", "predicted", "error"], *rows])
    return f"{text}\n\n{errors('The error', results['here_error'])}"


def several() -> str:
    results = read("scaling")
    rows = [
        [
            run["model"],
            f"{run['gpus']} x {run['card']}",
            f"{run['published_examples_per_s']:,g}",
            f"{run['predicted_examples_per_s']:,g}",
            f"{run['published_efficiency']:.1%}",
            f"{run['predicted_efficiency']:.1%}",
            f"{run['error']:+.1%}" + (" (fitted)" if run["fitted"] else ""),
        ]
        for run in results["published"]
    ]
    head = ["model", "GPUs", "published examples/s", "predicted", "published efficiency", "predicted", "error"]
    text = markdown([head, *rows])
    fitted, other = errors("The error of the fitted rows", results["fitted_error"]), results["other_error"]
    return f"{text}\n\n{fitted} {errors('The error of the others', other)}"


def ethernet() -> str:
    results = read("scaling")
    found = results["ethernet"]
    none, full = found["overlap_0%"], found["overlap_100%"]
    return (
        "Over Ethernet, Goyal et al. 2017 scale ResNet-50 from 8 to 256 P100 over 50 Gbit/s with an efficiency of\n"
        f"{found['published_efficiency']:.1%}. The model predicts {none['efficiency']:.1%} without overlap (error "
        f"{none['error']:+.1%}) and\n{full['efficiency']:.1%} with full overlap (error {full['error']:+.1%}). "
        "Their hours are rounded to whole hours."
    )


def errors(what: str, found: dict[str, float]) -> str:
    return f"{what} is {found['median']:.0%} (median) and {found['largest']:.0%} (largest)."


TABLES = {
    "published runs": published,
    "steps on this machine": here,
    "replicas that share cores": shared_cores,
    "several GPUs": several,
    "scaling over Ethernet": ethernet,
}
