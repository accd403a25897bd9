"""An engine without a model, only its timing: what serves where load, many slices or failures are the subject.

    http.py        vLLM's HTTP surface: a request becomes token ids and the answer it will get
    text.py        what a prompt is answered: a function of the prompt alone
    scheduler.py   which of the requests compute how many tokens in the next step, in which blocks of the cache
    physics.py     how long that step takes on the slice: the plan's roofline times what measurements ask for
    engine.py      waits that long and hands the tokens out
    server.py      all of it as the engine of a slice replica

Text, schema, tokenizer, blocks, scheduler, physics and faults decide; they see no clock, no socket and no Ray.
"""
