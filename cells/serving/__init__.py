"""SGLang: how a server is started on a CPU or a GPU, and how it is steered."""
