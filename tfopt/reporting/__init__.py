"""Tables and progress bars in the terminal, figures, and the HTML page about a run.

Start in terminal.py; html_page.py writes the page.
"""
