"""The ``warmroute analyse`` commands, one module each: options, tables and figures of one ``bench.analysis`` model.

May import everything else in ``bench.analysis``; imported by ``bench.analysis.cli`` only.
"""
