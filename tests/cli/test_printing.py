"""What a command shows while it works."""

from tfopt.cli.printing import progress


def test_a_sign_of_life_on_a_terminal_and_nothing_elsewhere(capsys, monkeypatch):
    with progress("verifying") as on_step:
        on_step("loading [int8]")
    assert capsys.readouterr() == ("", "")
    monkeypatch.setenv("FORCE_COLOR", "1")  # makes rich take a pipe for a terminal
    monkeypatch.setenv("TERM", "xterm")
    with progress("verifying") as on_step:
        on_step("loading [int8]")
    out, err = capsys.readouterr()
    assert out == ""
    assert "loading [int8]" in err
