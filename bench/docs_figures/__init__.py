"""The figures of docs/how-routing-decides.md, drawn from decisions of the code: `python -m bench.docs_figures`."""
