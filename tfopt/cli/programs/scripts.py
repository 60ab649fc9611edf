"""Commands that run a script of the user: their own flags end where the script begins."""

from __future__ import annotations

from collections.abc import Collection

from tfopt.atomic.own_files import json_with, write_own
from tfopt.cli.options import AccelerateOptions, LaunchOptions
from tfopt.cli.parsing import parse_words, start_tensorflow
from tfopt.cli.printing import say
from tfopt.cli.programs.outputs import writable_file
from tfopt.errors import ConfigError

IS_REPORT = json_with("name", "changed", "skipped", "metrics", "steps")  # a PassReport


def launch_command(words: list[str]) -> int:
    own, script = split_at_script(words)
    options = parse_words(LaunchOptions, own, "tfopt launch")
    start_tensorflow()
    from tfopt.training.distributed.launch import launch

    return launch(script, options.workers, options.devices_per_worker)


def accelerate_command(words: list[str]) -> int:
    # TensorFlow is not started: the script may set environment variables before it imports it.
    own, script = split_at_script(words, switches=("--xla", "--no-xla"))
    options = parse_words(AccelerateOptions, own, "tfopt accelerate")
    if not script:
        raise ConfigError(
            "The script must follow the options. Received: none. Write tfopt accelerate SCRIPT [ARGS...]."
        )
    out = None if options.report is None else writable_file("--report", options.report, IS_REPORT)
    from tfopt.scripts.accelerate import accelerate

    done = accelerate(script[0], script[1:], precision=options.precision, xla=options.xla)
    say(f"tfopt: {done.report}", error=True)
    if out is not None:
        write_own(out, done.report.to_json() + "\n", IS_REPORT)
    return done.exit_code


def split_at_script(words: list[str], switches: Collection[str] = ()) -> tuple[list[str], list[str]]:
    """Returns the words before a script, and the script with its own words.

    A flag of the script may have the name of a flag of ours, so our flags end where the script begins.

    Args:
        words: The words after the name of the command.
        switches: Flags without a value.
    Example:
        >>> split_at_script(["--workers", "2", "train.py", "--workers", "8"])
        (['--workers', '2'], ['train.py', '--workers', '8'])
    """
    place = 0
    while place < len(words) and words[place].startswith("-") and words[place] != "-m":
        alone = "=" in words[place] or words[place] in ("-h", "--help", *switches)
        place += 1 if alone else 2
    return words[:place], words[place:]
