"""vLLM's attention backend on the operations here.

`backend`, `metadata`, `warmup` and `context_parallel` are what its versions have in common; `v0_32`, `v0_33`, ... each
hold what one version has of its own, in the class that is registered with it. For the next version: run `make
vllm-engine` with a copy of the last such file, a line in `vllm_plugin.BACKENDS`, and its Python files in the Makefile;
what fails there says what the copy must hold.
"""
