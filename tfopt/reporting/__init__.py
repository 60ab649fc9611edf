"""Tables and progress bars in the terminal, figures, and the HTML page about a run.

Start in terminal.py; html_page.py writes the page about one run, comparison_page.py the one about several.
saved_report.py saves reports and reads them back. The templates of the pages are in templates/.
"""
