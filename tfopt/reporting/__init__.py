"""Tables and progress bars in the terminal, figures, and the HTML page about a run.

Start in terminal.py; html_page.py writes the page about one run, comparison.py the one about several, with the figures
of figures.py. saved_report.py saves reports and reads them back. The pages' templates are in templates/.
"""
