"""A page that shows what a model does with a few images, with a slider over t.

findings            everything that a report shows, measured
charts              charts that move with the image and with t
page                write_report: the page and report.json
page.html           its template
"""
