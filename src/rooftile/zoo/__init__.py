"""GPT-2 and Llama families in plain torch."""
