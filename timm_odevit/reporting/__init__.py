"""A page that shows what a model does to a few images.

findings     everything that the page shows, measured
pictures     images, attention and tokens as PNG; static plots with matplotlib
charts       charts that move with t, with Plotly
page         the page itself, report.json and the PNG files
"""
