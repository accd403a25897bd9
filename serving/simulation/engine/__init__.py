"""An engine without a model, with only its timing: it serves tests of load, of many slices and of failures.

    http.py        vLLM's HTTP surface: a request becomes token ids and the answer it will get
    text.py        the answer to a prompt: a function of the prompt alone
    scheduler.py   which of the requests compute how many tokens in the next step, in which blocks of the cache
    physics.py     how long that step takes on the slice: the plan's roofline times calibrated factors
    engine.py      waits for the step's time and hands the tokens out
    server.py      the whole as the engine of a slice replica

Text, schema, tokenizer, blocks, scheduler, physics and faults decide; they see no clock, no socket and no Ray.
"""
