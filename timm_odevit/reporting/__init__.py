"""Pages that need no network and no server, and the report of what a model does with a few images.

page, page.html     the writer of pages, for the report and for the verdict of `shrink`, and what draws them
findings            everything that a report shows, measured
report              write_report: index.html, with its charts, and report.json
"""
