"""A bench document made readable: rows of a table, Markdown, plots as SVG, one self-contained HTML page."""
