"""A bench document made readable: rows of a table, Markdown, plots, one self-contained HTML page; and any table written out."""
