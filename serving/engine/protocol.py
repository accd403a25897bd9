"""What both engines understand of a request beyond vLLM's own fields."""

# In `vllm_xargs`: ids of the tokens of the answer that another engine gave already; this one goes on behind them.
CONTINUED = "continued_token_ids"
