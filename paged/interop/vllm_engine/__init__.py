"""vLLM's attention backend on this project's operations; its modules import vLLM. For versions see docs/interop.md."""
