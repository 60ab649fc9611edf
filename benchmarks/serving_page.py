"""The table of docs/serving.md: the settings that two searches found, and their speed over that without settings."""

from __future__ import annotations

from page_tables import Table, read

from tfopt.report.formatting import grouped


def settings() -> Table:
    rows = [["model", "format", "batch", "calls x threads", "examples/s", "of no settings", "interval", "found again"]]
    for each in read("served_settings")["rows"]:
        again, times = each["again"], each["times"]
        rows.append(
            [
                each["model"],
                each["format"],
                str(each["batch_size"]),
                f"{each['calls']} x {each['threads']}",
                grouped(each["with"]["median"]),
                f"{times['median']:.2f}x",
                f"{times['least']:.2f}x to {times['most']:.2f}x",
                f"{again['batch_size']}, {again['calls']} x {again['threads']}",
            ]
        )
    return rows


TABLES = {"served settings": settings}
