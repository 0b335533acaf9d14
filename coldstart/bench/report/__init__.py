"""Reports of a benchmark document: table rows, Markdown, plots, one self-contained HTML page; and export of any table."""
