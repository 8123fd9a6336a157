"""Data-plane benchmark: our proxy, vLLM Router, SGLang's gateway and nginx in front of the same engine stub.

Starts processes only; imports nothing else of the project but the version.
"""
