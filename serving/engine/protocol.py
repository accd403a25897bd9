"""The fields of a request that both engines know beyond vLLM's own."""

# In `vllm_xargs`: ids of the tokens that another engine gave already. This engine goes on behind them.
CONTINUED = "continued_token_ids"
