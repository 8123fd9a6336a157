"""Tables of the experiment ``static-pd``: prefill/decode splits against combined and elastic serving.

May import launch's experiment records, the replayer and policies' types.
"""
