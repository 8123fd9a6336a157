"""Figures of the pages, drawn from decisions of the code and kept results: `python -m bench.docs_figures`."""
