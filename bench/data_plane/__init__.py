"""The data plane measured: our proxy, vLLM Router, SGLang's gateway and nginx before the same engine stub."""
