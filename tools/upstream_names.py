"""The one table of what we import, patch or read of vLLM and tpu-inference, and of Ray's private parts.

A signature lists parameters as `tools.python_source.signature` does: `x=` has a default. A name without one is wanted
by its name alone. What we replace has to be read by its own package too, else our replacement does nothing.
`tools.upstream` finds our modules that use a name by itself, so none is typed here.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from serving.metrics.table import VLLM as VLLM_METRICS
from serving.planning import engine_environment
from serving.planning.engine_options import DERIVED, SETTABLE
from serving.planning.vllm_variables import VARIABLES


@dataclass(frozen=True)
class Name:
    """A name that we rely on, or, with `line`, a string of the module by how one of its lines begins.

    `why` goes on where the name ends: "X is replaced: ...".
    """

    path: str
    why: str
    signature: str | None = None
    line: str | None = None

    @property
    def module(self) -> str:
        return self.path.partition(":")[0]

    @property
    def package(self) -> str:
        return self.path.partition(".")[0]

    @property
    def is_replaced(self) -> bool:
        return self.why.startswith("is replaced")

    @property
    def label(self) -> str:
        return self.path if self.line is None else f'{self.path} "{self.line}"'


def _members(owner: str, names: Iterable[str], why: str) -> tuple[Name, ...]:
    joint = "." if ":" in owner else ":"
    return tuple(Name(f"{owner}{joint}{name}", why) for name in names)


def _lines(module: str, lines: Iterable[str], why: str) -> tuple[Name, ...]:
    return tuple(Name(module, why, line=line) for line in lines)


ENGINE_ARGUMENTS = "vllm.engine.arg_utils:AsyncEngineArgs"
_COMPILER_OPTIONS = "tpu_inference.models.common.compiler_options"
# Classes whose fields, and modules whose functions, the table lists in full: a new one is a change too.
LISTED_IN_FULL = (ENGINE_ARGUMENTS, _COMPILER_OPTIONS)

_ASYNC_LLM = "vllm.v1.engine.async_llm:AsyncLLM"
_DETOKENIZER = "vllm.v1.engine.detokenizer:"
_CHAT = "vllm.entrypoints.openai.chat_completion."
_MESSAGES = "vllm.entrypoints.anthropic.serving:AnthropicServingMessages"
_RESPONSES = "vllm.entrypoints.openai.responses.serving:OpenAIServingResponses"
_COMPLETION = "vllm.entrypoints.openai.completion."
_WORKER = "tpu_inference.worker.tpu_worker:"
_RUNNER = "tpu_inference.runner.tpu_runner:TPUModelRunner"
_RPA = "tpu_inference.kernels.ragged_paged_attention.v3."
_SERVE = "ray.serve._private."

_ENGINE = (
    Name(f"{ENGINE_ARGUMENTS}.from_cli_args", "makes engine arguments of the parsed flags", "args"),
    Name(
        f"{ENGINE_ARGUMENTS}.create_engine_config", "makes the engine's config", "usage_context=, headless="
    ),
    Name(
        "vllm.entrypoints.openai.api_server:build_app",
        "builds the HTTP app of an engine",
        "args, supported_tasks=, model_config=",
    ),
    Name(
        "vllm.entrypoints.openai.api_server:init_app_state",
        "fills the app's state",
        "engine_client, state, args, supported_tasks=",
    ),
    Name(
        "vllm.entrypoints.openai.cli_args:make_arg_parser", "parses the flags that a plan renders", "parser"
    ),
    Name("vllm.utils.argparse_utils:FlexibleArgumentParser", "parses the flags that a plan renders"),
    Name(
        f"{_ASYNC_LLM}.from_vllm_config",
        "starts EngineCore and its workers",
        "vllm_config, start_engine_loop=, usage_context=, stat_loggers=, enable_log_requests=, aggregate_engine_logging=, disable_log_stats=, client_addresses=, client_count=, client_index=",
    ),
    Name(
        f"{_ASYNC_LLM}.generate",
        "is replaced: it looks at the sampling parameters at once, and asks for one logprob where a request asks for the token's own alone",
        "prompt, sampling_params, request_id, *, prompt_text=, lora_request=, tokenization_kwargs=, trace_headers=, priority=, data_parallel_rank=, reasoning_ended=, reasoning_parser_kwargs=",
    ),
    Name(
        "vllm.entrypoints.generate.base.serving:GenerateBaseServing._raise_if_error",
        "is replaced: an answer that its engine was stopped in is an error",
        "finish_reason, request_id",
    ),
    Name(f"{_ASYNC_LLM}.get_supported_tasks", "tells build_app which routes to add", ""),
    Name(f"{_ASYNC_LLM}.check_health", "probes EngineCore", ""),
    Name(f"{_ASYNC_LLM}.collective_rpc", "probes every worker", "method, timeout=, args=, kwargs="),
    Name("vllm.v1.worker.worker_base:WorkerBase.check_health", "is what the probe calls on a worker", ""),
    Name(f"{_ASYNC_LLM}.shutdown", "ends the engine after a drain", "timeout="),
    *_members(
        _ASYNC_LLM, ("errored", "model_config", "output_processor"), "tells the replica how its engine is"
    ),
    Name(
        "vllm.v1.engine.output_processor:OutputProcessor.get_num_unfinished_requests",
        "counts the requests that run or wait",
        "",
    ),
    Name(
        "vllm.v1.engine.output_processor:OutputProcessor.request_states",
        "has the requests that run or wait",
        None,
    ),
    Name(
        "vllm.v1.engine.output_processor:RequestState.is_prefilling",
        "tells whether a request has no token yet",
        None,
    ),
    *_members(
        "vllm.config.parallel:ParallelConfig",
        ("placement_group", "pipeline_parallel_size", "worker_cls", "distributed_executor_backend"),
        "puts the engine's workers on the slice's placement group, and simulated ones in their place",
    ),
    *_members(
        "vllm.config.vllm:VllmConfig",
        ("instance_id", "model_config", "parallel_config"),
        "leads to the parts of the engine's config that we read",
    ),
    Name("vllm.config.model:ModelConfig.max_model_len", "is published as the slice's longest request"),
    Name(
        "vllm.v1.executor.abstract:Executor.uses_ray",
        "tells an engine on Ray workers from one in its own process",
    ),
    Name(
        "vllm.v1.executor.ray_utils",
        "begins the names of Ray workers; a dead one ends a start",
        line="vllm_Worker_",
    ),
    Name(
        "vllm.entrypoints.serve.utils.server_utils:engine_error_handler.req.app.state.server",
        "is the uvicorn server that vLLM stops on an engine error",
    ),
    Name("vllm.v1.metrics.loggers:StatLoggerBase", "is the base of the logger that reads an engine's load"),
    Name(
        "vllm.v1.metrics.loggers:StatLoggerBase.__init__",
        "is overridden to read an engine's load",
        "vllm_config, engine_index=",
    ),
    Name(
        "vllm.v1.metrics.loggers:StatLoggerBase.record",
        "is overridden to read an engine's load",
        "scheduler_stats, iteration_stats, mm_cache_stats=, engine_idx=",
    ),
    Name("vllm.v1.metrics.loggers:StatLoggerBase.log_engine_initialized", "is overridden to say nothing", ""),
    *_members(
        "vllm.v1.metrics.stats:SchedulerStats",
        ("num_running_reqs", "kv_cache_usage"),
        "is published as the slice's load",
    ),
    *_members(
        "vllm.v1.metrics.stats:IterationStats",
        ("prompt_token_stats", "num_generation_tokens"),
        "is published as the slice's tokens",
    ),
    *_members(
        "vllm.v1.metrics.stats:PromptTokenStats",
        ("total", "cached_tokens"),
        "is published as the slice's tokens",
    ),
    *_members(
        "vllm.distributed.kv_events",
        (
            "BlockStored.block_hashes",
            "BlockStored.group_idx",
            "BlockRemoved.block_hashes",
            "BlockRemoved.group_idx",
            "AllBlocksCleared",
            "EventBatch.ts",
            "EventBatch.events",
        ),
        "is decoded to know what a prefix cache has dropped",
    ),
    *_lines(
        "vllm.v1.metrics.loggers",
        (name.removesuffix("_total") for name in VLLM_METRICS),
        "is a metric that dashboards and rules count on",
    ),
    *_members(
        ENGINE_ARGUMENTS,
        sorted(SETTABLE | DERIVED.keys()),
        "is an engine option that the YAML sets or a plan derives",
    ),
    *_lines("vllm.envs", sorted(VARIABLES), "is a variable that we or the YAML set"),
    *_lines(
        "vllm.plugins",
        ("vllm.general_plugins", "vllm.platform_plugins"),
        "is an entry point through which vLLM loads our plugins",
    ),
    Name(
        "vllm.v1.core.kv_cache_utils:get_kv_cache_capacity",
        "is the tokens that the cache of a started engine holds",
        "vllm_config, kv_cache_config",
    ),
    Name(
        "vllm.config.parallel:ParallelConfig.worker_extension_cls",
        "adds the methods by which workers tell what they found",
    ),
    *_members(
        _RUNNER,
        ("mesh", "kv_cache_config", "model"),
        "is what a worker tells of its start",
    ),
    *_members(
        "vllm.v1.core.sched.output:SchedulerOutput",
        ("scheduled_new_reqs", "num_scheduled_tokens"),
        "is what a worker tells of a step that compiled a program",
    ),
    *_members(
        "vllm.v1.core.sched.output:NewRequestData",
        ("req_id", "prompt_token_ids"),
        "is what a worker tells of a step that compiled a program",
    ),
)

_TEXTS = (
    Name(f"{_ASYNC_LLM}.renderer", "tokenizes"),
    Name(
        "vllm.renderers.base:BaseRenderer.__init__",
        "makes the executor whose `submit` is replaced: short texts go before long ones",
        "config, tokenizer",
    ),
    Name(
        "vllm.renderers.base:BaseRenderer._tokenize_prompt",
        "is known by its name as work on a text",
        "prompt, params",
    ),
    Name("vllm.renderers.hf:safe_apply_chat_template", "is known by its name as work on a text"),
    Name("vllm.tokenizers.hf:ThreadSafeHFTokenizerMixin", "tells that several threads may use a tokenizer"),
)

_GRAMMARS = (
    Name(
        "vllm.v1.core.sched.scheduler:check_stop",
        "is replaced: it ends answers whose grammar takes too long, or allows no token",
        "request, max_model_len",
    ),
    *(
        Name(
            f"vllm.v1.structured_output.backend_{backend}.{method}",
            "is replaced: its time is added up",
            signature,
        )
        for backend in ("xgrammar:XgrammarGrammar", "guidance:GuidanceGrammar")
        for method, signature in (("fill_bitmask", "bitmask, idx"), ("accept_tokens", "request_id, tokens"))
    ),
    *_members(
        "vllm.v1.request",
        (
            "Request.structured_output_request",
            "Request.num_output_tokens",
            "Request.stop_reason",
            "RequestStatus.FINISHED_LENGTH_CAPPED",
            "RequestStatus.FINISHED_ERROR",
        ),
        "tells and ends an answer with a grammar",
    ),
    Name(
        "vllm.v1.structured_output.request:StructuredOutputRequest.grammar", "has the time that was added up"
    ),
    Name("vllm.sampling_params:SamplingParams.structured_outputs", "is a request's grammar"),
    Name(
        "vllm.v1.engine.input_processor:InputProcessor._validate_params",
        "is replaced: it tells a client's mistakes before an answer begins, and once",
        "params, supported_tasks",
    ),
    Name(
        "vllm.v1.engine.input_processor:InputProcessor.process_inputs",
        "is replaced: it refuses what EngineCore can't read",
        "request_id, prompt, params, supported_tasks, arrival_time=, lora_request=, tokenization_kwargs=, trace_headers=, priority=, data_parallel_rank=, resumable=",
    ),
    Name("vllm.v1.engine:EngineCoreRequest.pooling_params", "is read as EngineCore will read it"),
    Name(
        "vllm.entrypoints.openai.responses.serving:OpenAIServingResponses._generate_with_builtin_tools",
        "is replaced: it looks at the sampling parameters before it is read",
        "request_id, engine_input, sampling_params, context, lora_request=, priority=, trace_headers=, reasoning_parser_kwargs=",
    ),
    Name(
        "vllm.entrypoints.openai.responses.serving:OpenAIServingResponses._make_request",
        "is replaced: an item that it can make no message of is a client's mistake",
        "request, prev_response",
    ),
    *_members(
        "vllm.entrypoints.anthropic.serving:AnthropicServingMessages",
        ("create_messages", "count_tokens"),
        "is replaced: a client's mistake is no failure of the engine",
    ),
    Name(
        "vllm.entrypoints.serve.engine.serving:BaseServing.create_error_response",
        "makes the error of a client's mistake",
    ),
    Name(f"{_ASYNC_LLM}.input_processor", "looks at sampling parameters"),
    Name(
        "vllm.sampling_params:StructuredOutputsParams.all_constraints_none",
        "tells whether there is one",
        "",
    ),
    *_members(
        "vllm.v1.core.sched.output:GrammarOutput",
        ("structured_output_request_ids", "grammar_bitmask"),
        "has the masks of a step, in the scheduler's order",
    ),
    Name(
        "vllm.v1.core.sched.output:SchedulerOutput.scheduled_spec_decode_tokens",
        "tells how many masks and rows of logits a request has",
    ),
    Name(
        f"{_RUNNER}.sample_tokens",
        "is replaced: it keeps what was drafted for the requests of a step",
        "grammar_output",
    ),
    Name(
        "tpu_inference.runner.structured_decoding_manager:StructuredDecodingManager.prepare_structured_decoding_input",
        "is replaced: it lays the masks of grammars out by the rows of logits",
        "logits, grammar_output",
    ),
    *_members(
        _RUNNER,
        ("execute_model_state", "grammar_bitmask_cpu", "input_batch", "structured_decode_arange"),
        "tells the rows of logits and the size of a mask",
    ),
    *_members(
        "tpu_inference.runner.input_batch:InputBatch",
        ("req_ids", "num_reqs"),
        "has the requests of a step in the order of their logits",
    ),
    Name(
        "tpu_inference.runner.input_batch:InputBatch.add_request",
        "is replaced: a greedy request gets a temperature that drafted tokens can be checked by",
        "request, req_index=, dp_rank=",
    ),
    Name("tpu_inference.runner.input_batch:InputBatch.req_id_to_index", "is a request's row in a batch"),
    Name("tpu_inference.runner.input_batch:InputBatch.temperature_cpu", "has the temperatures of a batch"),
    Name("tpu_inference.utils:device_array", "puts masks on the devices", "mesh, *args, sharding=, **kwargs"),
)

_RESUME = (
    Name(f"{_WORKER}PPConfig", "is replaced: it gives a pipeline's stage its addresses and its host's chips"),
    Name(
        f"{_WORKER}PPConfig.default_tpu_chips_per_process_bounds",
        "tells a pipeline's stage how its host's chips lie",
    ),
    Name(
        f"{_DETOKENIZER}IncrementalDetokenizer.from_new_request",
        "is replaced: it replays the ids said so far",
        "tokenizer, request",
    ),
    Name(
        f"{_DETOKENIZER}IncrementalDetokenizer.update",
        "replays the ids said so far",
        "new_token_ids, stop_terminated",
    ),
    Name(
        f"{_DETOKENIZER}IncrementalDetokenizer.get_next_output_text",
        "replays the ids said so far",
        "finished, delta",
    ),
    Name(f"{_DETOKENIZER}IncrementalDetokenizer.token_ids", "is emptied after the replay"),
    Name(f"{_DETOKENIZER}BaseIncrementalDetokenizer.min_tokens", "keeps stop strings from ending the replay"),
    Name(f"{_DETOKENIZER}SlowIncrementalDetokenizer.prompt_len", "moves behind the replayed ids"),
    *_members(
        "vllm.v1.engine:EngineCoreRequest",
        ("request_id", "prompt_token_ids", "prompt_embeds", "sampling_params"),
        "is what a detokenizer reads of its request",
    ),
    *_members(
        "vllm.sampling_params:SamplingParams",
        (
            "extra_args",
            "include_stop_str_in_output",
            "skip_special_tokens",
            "spaces_between_special_tokens",
            "stop",
        ),
        "carries the ids said so far, and how a detokenizer treats them",
    ),
    Name(
        "vllm.parser.abstract_parser:Parser.parse_delta",
        "is overridden: it first reads the ids said so far",
        "delta_text, delta_token_ids, request, prompt_token_ids=, *, finished",
    ),
    Name("vllm.parser.abstract_parser:Parser.model_tokenizer", "decodes the ids said so far"),
    *_members(
        "vllm.entrypoints.generate.api_router:init_generate_state",
        ("state.openai_serving_chat", "state.openai_serving_completion"),
        "is the handler that learns to go on with an answer",
    ),
    Name(
        f"{_CHAT}serving:OpenAIServingChat.render_chat_request",
        "is replaced: it adds the ids to the prompt",
        "request",
    ),
    Name(f"{_CHAT}serving:OpenAIServingChat.parser_cls", "is replaced by a parser that reads the ids first"),
    *_members(
        "vllm.entrypoints.generate.api_router:init_generate_state",
        ("state.anthropic_serving_messages", "state.openai_serving_responses"),
        "is the handler whose streams are run step by step",
    ),
    Name(
        f"{_CHAT}serving:OpenAIServingChat.chat_completion_stream_generator",
        "is replaced: a message's converter runs it by hand",
        "request, result_generator, request_id, model_name, conversation, tokenizer, request_metadata, "
        "chat_template_kwargs=, mm_token_counts=",
    ),
    Name(
        f"{_MESSAGES}.create_chat_completion",
        "is replaced: it takes over what of a message only our engines know",
        "request, raw_request=",
    ),
    Name(
        f"{_MESSAGES}.message_stream_converter",
        "is replaced: it is run by hand, and tells tokens",
        "generator",
    ),
    Name(
        f"{_MESSAGES}.messages_full_converter",
        "is replaced: it names the stop sequence that ended a message",
        "generator",
    ),
    Name(
        f"{_RESPONSES}.create_responses",
        "is replaced: it refuses ids that can't be gone on with",
        "request, raw_request=",
    ),
    Name(
        f"{_RESPONSES}.responses_stream_generator",
        "is replaced: it is run by hand, and tells tokens",
        "request, sampling_params, result_generator, context, model_name, tokenizer, request_metadata, created_time=",
    ),
    *_members(
        "vllm.outputs:RequestOutput",
        ("outputs", "prompt_token_ids", "num_cached_tokens", "finished"),
        "is a step of an answer",
    ),
    *_members(
        "vllm.outputs:CompletionOutput",
        ("text", "token_ids", "finish_reason", "stop_reason"),
        "is a step of an answer",
    ),
    *_members(_RESPONSES, ("use_harmony", "parser"), "tells how its answers are read"),
    *_members(
        "vllm.entrypoints.openai.responses.context:SimpleContext",
        ("last_output",),
        "has a step's tokens",
    ),
    *(
        Name(f"{handler}.{name}", "bounds an answer, less what another slice has given of it")
        for handler in (
            f"{_CHAT}serving:OpenAIServingChat",
            f"{_COMPLETION}serving:OpenAIServingCompletion",
        )
        for name in ("default_sampling_params", "override_max_tokens")
    ),
    Name(
        f"{_CHAT}serving:OpenAIServingChat.create_error_response",
        "refuses ids that can't be gone on with",
        "message, err_type=, status_code=, param=",
    ),
    Name(
        f"{_COMPLETION}serving:OpenAIServingCompletion.render_completion_request",
        "is replaced: it adds the ids to the prompt",
        "request",
    ),
    Name(
        f"{_COMPLETION}serving:OpenAIServingCompletion.create_error_response",
        "refuses ids that can't be gone on with",
        "message, err_type=, status_code=, param=",
    ),
    *_members(
        f"{_CHAT}protocol:ChatCompletionRequest",
        (
            "include_stop_str_in_output",
            "n",
            "skip_special_tokens",
            "spaces_between_special_tokens",
            "stop",
            "stream",
            "vllm_xargs",
        ),
        "tells whether and how to go on with an answer",
    ),
    *_members(
        f"{_COMPLETION}protocol:CompletionRequest",
        ("n", "stream", "vllm_xargs"),
        "tells whether to go on with an answer",
    ),
)

_STARTUP = (
    Name("vllm.v1.engine.core", "begins the phase 'starting workers'", line="Initializing a V1 LLM engine"),
    Name("tpu_inference.worker.tpu_worker", "begins the phase 'loading weights'", line="Init worker"),
    Name(
        "tpu_inference.runner.kv_cache_manager",
        "begins the phase 'making the KV cache'",
        line="Init kv-cache",
    ),
    *_lines(
        "tpu_inference.runner.compilation_manager",
        ("Precompile", "Compiling"),
        "begins the phase 'compiling'",
    ),
)

_TPU_INFERENCE = (
    *_lines(
        "tpu_inference.envs",
        sorted(engine_environment.SETTABLE | (engine_environment.DERIVED.keys() - VARIABLES)),
        "is a variable that we or the YAML set",
    ),
    Name("tpu_inference.platforms.tpu_platform:TpuPlatform", "is the simulated platform's base"),
    Name(
        "tpu_inference.platforms.tpu_platform:TpuPlatform.get_device_name",
        "is overridden: its chips are pretended",
        "device_id=",
    ),
    Name(
        "tpu_inference.platforms.tpu_platform:TpuPlatform.check_and_update_config",
        "is overridden: it names the simulated worker and executor",
        "vllm_config",
    ),
    Name(
        "tpu_inference.utils:hbm_usage_bytes",
        "is replaced: a CPU device keeps no memory statistics",
        "devices",
    ),
    Name(
        "tpu_inference.utils:make_optimized_mesh",
        "is replaced: a CPU device has no coordinates",
        "axis_shapes, axis_names, *, devices=",
    ),
    Name(
        "tpu_inference.utils:general_device_put",
        "is replaced: the CPU backend aliases numpy buffers",
        "tensor, sharding, *, layout=, source_mesh=",
    ),
    Name(
        "tpu_inference.layers.common.utils:general_device_put",
        "is replaced: the CPU backend aliases numpy buffers",
        "tensor, sharding, *, layout=, source_mesh=",
    ),
    Name(
        "vllm.distributed.device_communicators.shm_broadcast:SpinCondition.wait",
        "is replaced: idle processes of several engines would take a laptop's cores",
        "timeout_ms=",
    ),
    Name(
        "vllm.distributed.device_communicators.shm_broadcast:SpinCondition",
        "its waits are shortened: `busy_loop_s` is set on it",
    ),
    Name(
        f"{_COMPILER_OPTIONS}:get_step_fn_compiler_options",
        "is replaced: XLA's CPU backend knows no xla_tpu options",
        "",
    ),
    Name(
        f"{_RPA}kernel:ragged_paged_attention",
        "is replaced: a Pallas kernel needs a TPU",
        "queries, keys, values, kv_cache, kv_lens, page_indices, cu_q_lens, distribution, *, use_causal_mask=, update_kv_cache=, skip_kv_mask=, sm_scale=, sliding_window=, soft_cap=, out_dtype=, mask_value=, q_scale=, k_scale=, v_scale=, chunk_prefill_size=, d_block_sizes=, p_block_sizes=, m_block_sizes=, vmem_limit_bytes=, debug_mode=, disable_bounds_checks=, disable_semaphore_checks=",
    ),
    Name(
        f"{_RPA}kernel_hd64:ragged_paged_attention_hd64",
        "is replaced: a Pallas kernel needs a TPU",
        "queries, keys, values, kv_cache, kv_lens, page_indices, cu_q_lens, distribution, attention_sink=, *, sm_scale=, sliding_window=, soft_cap=, mask_value=, q_scale=, k_scale=, v_scale=, chunk_prefill_size=, num_kv_pages_per_block=, num_queries_per_block=, vmem_limit_bytes=, debug_mode=",
    ),
    Name(f"{_RPA}kernel:merge_kv", "lays out the KV cache of our attention", "k, v"),
    Name(f"{_RPA}kernel_hd64:merge_kv", "lays out the KV cache of our attention", "k, v"),
    Name(
        "tpu_inference.executors.ray_distributed_executor_v2:RayDistributedExecutorV2",
        "is the simulated executor's base",
    ),
    Name(
        "tpu_inference.executors.ray_distributed_executor_v2:RayDistributedExecutorV2._init_executor",
        "is overridden: it joins Ray as its own host",
        "",
    ),
    Name(
        f"{_WORKER}get_device_topology_order_id",
        "is replaced: a CPU device has no coordinates",
        "local_devices, global_devices",
    ),
    Name(f"{_WORKER}TPUWorker", "is the simulated worker's base"),
    Name(
        f"{_WORKER}TPUWorker.init_device",
        "is overridden: it makes one JAX cluster of a slice's hosts",
        "tpu_process_bounds=, tpu_chips_per_process_bounds=, tpu_visible_chips=",
    ),
    *_members(
        f"{_WORKER}TPUWorker",
        ("devices", "distributed_init_method", "rank", "vllm_config"),
        "tells a simulated host its place in the slice",
    ),
    Name("vllm.logger:init_logger", "logs as vLLM's processes do", "name"),
)

_RAY = (
    Name(
        f"{_SERVE}default_impl:_default_create_placement_group",
        "is replaced: it places a replica on one slice",
        "request",
    ),
    *_members(
        f"{_SERVE}common:CreatePlacementGroupRequest",
        ("bundles", "name"),
        "tells which slice a replica wants",
    ),
    Name(
        f"{_SERVE}application_state:deploy_args_to_deployment_info",
        "is replaced: slices and routers restart only where they change",
        "deployment_name, deployment_config_proto_bytes, replica_config_proto_bytes, deployer_job_id, app_name=, ingress=, ingress_request_router=, route_prefix=, uses_multiplexing=, **kwargs",
    ),
    *_members(
        f"{_SERVE}deployment_info:DeploymentInfo",
        ("version", "deployment_config", "replica_config"),
        "carries the version that we set",
    ),
    Name(
        f"{_SERVE}deployment_scheduler:DeploymentScheduler._get_replicas_to_stop",
        "is replaced: the slice that costs least to drain stops first",
        "deployment_id, max_num_to_stop, gang_id_by_replica=, replicas_by_gang_id=, gang_size=",
    ),
    Name(f"{_SERVE}deployment_scheduler:DeploymentScheduler._running_replicas", "tells which replicas serve"),
    *(
        Name(f"{_SERVE}deployment_state:DeploymentState.{name}", purpose, parameters)
        for name, purpose, parameters in (
            ("_surge_replicas_to_start", "is replaced: a changed engine rolls in waves", ""),
            ("_surge_replicas_to_stop", "is replaced: a changed engine rolls in waves", ""),
            (
                "scale_deployment_replicas",
                "is replaced: it tells how far a roll is",
                "gang_placement_groups=, proxy_nodes=",
            ),
            (
                "_get_upscale_replicas",
                "is replaced: starts that failed are tried again, and none is beyond the budget",
                "to_add, gang_placement_groups=, target_node_ids=",
            ),
            (
                "_check_startup_replicas",
                "is replaced: slices that start outlive the controller",
                "original_state, stop_on_slow=",
            ),
            (
                "_stop_replica",
                "ends a replica that a controller found and has no answer from",
                "replica, graceful_stop=",
            ),
            ("_terminally_failed", "tells whether Serve has given up", ""),
            ("_surge_rollout_in_progress", "tells whether a roll is under way", ""),
            ("_rescale_to", "shrinks a pool that was taken out", "num_replicas"),
        )
    ),
    *_members(
        f"{_SERVE}deployment_state:DeploymentState",
        (
            "_failed_to_start_threshold",
            "_id",
            "_replicas",
            "_target_state",
            "_target_state_changed",
            "_deployed_info",
            "_replica_failure_count",
            "_replica_failure_message",
            "_replica_has_started",
            "_in_transition",
        ),
        "tells where Serve is with a deployment",
    ),
    *_members(
        f"{_SERVE}deployment_state:DeploymentReplica",
        ("version", "actor_details", "actor_node_id"),
        "tells where a replica is in its start",
    ),
    Name(
        f"{_SERVE}deployment_state:ActorReplicaWrapper.check_ready",
        "is replaced: slices that start outlive the controller",
        "",
    ),
    *_members(
        f"{_SERVE}deployment_state:ActorReplicaWrapper",
        ("_was_initialized_obj_ref", "_actor_handle", "_replica_id", "_unrecoverable"),
        "tells whether a replica that a controller found has started",
    ),
    Name(
        f"{_SERVE}deployment_state:ReplicaStartupStatus.PENDING_INITIALIZATION",
        "tells Serve that a replica is in its start",
    ),
    Name(f"{_SERVE}common:ReplicaState", "tells where a replica is in its start"),
    *_members(
        f"{_SERVE}common:ReplicaState",
        ("STARTING", "UPDATING", "RUNNING", "RECOVERING", "STOPPING"),
        "tells where a replica is in its start",
    ),
    Name(
        f"{_SERVE}application_state:ApplicationState._delete_deployment",
        "is replaced: a pool taken out serves until others do",
        "name",
    ),
    Name(
        f"{_SERVE}application_state:ApplicationState._update_status",
        "is replaced: the store is told what Serve refused to deploy",
        "status, status_msg=",
    ),
    Name(
        f"{_SERVE}application_state:ApplicationState.__init__",
        "is replaced: the controller tells which applications Serve has",
    ),
    *_members(
        f"{_SERVE}application_state:ApplicationState",
        ("_name", "_target_state", "target_deployments", "_deployment_state_manager"),
        "tells what an application is to run",
    ),
    *_members(
        f"{_SERVE}replica",
        ("start_asgi_http_server", "RequestMetadata", "RequestProtocol", "is_tracing_enabled"),
        "lets a router answer requests before Serve's app",
    ),
    *_members(
        f"{_SERVE}replica:ReplicaMetricsManager",
        ("inc_num_ongoing_requests", "dec_num_ongoing_requests", "record_request_metrics"),
        "counts the requests that a router answers itself",
    ),
    Name(
        "ray.serve.context:_get_global_client",
        "leads to the address that the front door listens on",
        "raise_if_no_controller_running=",
    ),
    Name(
        f"{_SERVE}client:ServeControllerClient.http_config",
        "holds the address that the front door listens on",
    ),
    *_members(
        f"{_SERVE}constants",
        (
            "RAY_SERVE_HAPROXY_BINARY_PATH",
            "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD",
            "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT",
            "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT",
            "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT",
            "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT",
            "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC",
            "RAY_SERVE_HAPROXY_SOCKET_PATH",
            "RAY_SERVE_HAPROXY_SERVER_STATE_BASE",
            "RAY_SERVE_HAPROXY_SERVER_STATE_FILE",
            "RAY_SERVE_HAPROXY_METRICS_PORT",
            "RAY_SERVE_HAPROXY_STATS_PORT",
        ),
        "is a variable that we set",
    ),
    *_lines(
        f"{_SERVE}haproxy_templates",
        ("use_backend ", "http-request return status 404 ", "errorfile ", "hard-stop-after "),
        "is a line of HAProxy's config that we change",
    ),
    Name("ray._private.state:state.get_draining_nodes", "tells which hosts are to go", ""),
    Name(
        "ray._private.state:actors",
        "tells which of an engine's workers died",
        "actor_id=, job_id=, actor_state_name=",
    ),
    *_lines(
        "ray._private.state",
        ("Name", "ActorClassName", "Address", "IPAddress", "JobID", "NodeID", "Pid"),
        "is a key of what `actors` returns",
    ),
    Name("ray._private.worker:global_worker.node", "leads to the directory of Ray's session"),
    Name("ray._private.node:Node.get_session_dir_path", "is where the request log goes", ""),
    Name("ray._raylet:GcsClient", "reads and writes the control store without joining the cluster"),
    Name("ray._raylet:AuthenticationTokenLoader", "has the token read anew where it is another cluster's"),
    Name("ray._raylet:Config", "has the mode of authentication read anew"),
)

# What `serving compile` builds engines with, without a TPU (serving/compiler).
_COMPILER: tuple[Name, ...] = (
    *_members(
        "tpu_inference.models.jax.utils.weight_utils",
        ("LoadableWithIterator", "JaxDummyModelLoader._process_weights_after_loading", "shard_put"),
        "loads a model in JAX; a description stands for each weight",
    ),
    *_members(
        "tpu_inference.models.jax.utils.qwix.qwix_utils",
        ("apply_qwix_on_abstract_model", "apply_qwix_quantization"),
        "quantizes a model in JAX",
    ),
    *_members(
        "tpu_inference.models.vllm.vllm_model_wrapper",
        ("VllmModelWrapper.load_weights", "vllm_get_model"),
        "loads a model of vLLM; a description stands for each weight",
    ),
    *_members(
        "vllm.model_executor.model_loader.utils",
        ("initialize_model", "process_weights_after_loading"),
        "makes a model of vLLM on torch's meta device",
    ),
    *_members(
        "tpu_inference.utils",
        ("hbm_usage_gb", "t2j", "to_jax_dtype"),
        "asks devices, or converts arrays; descriptions have neither",
    ),
    *(
        Name(path, "is replaced: arrays have a shape and no bytes")
        for path in (
            "tpu_inference.layers.common.utils:cpu_mesh_context",
            "tpu_inference.layers.vllm.process_weights.cleanup_sharding:_tensor_is_in_cpu",
            "tpu_inference.models.common.model_loader:_get_nnx_model",
            "tpu_inference.models.vllm.experimental.qwen3_vl_patcher:_convert_to_torchax_tensor",
            "tpu_inference.runner.kv_cache:_get_kv_cache_allocator",
        )
    ),
    Name(
        "vllm.model_executor.models.registry:_run_in_subprocess",
        "inspects models in this process, not another",
    ),
    Name("tpu_inference.runner.compilation_manager:CompilationManager", "lists an engine's programs"),
    Name("tpu_inference.runner.tpu_runner:CompilationManager", "lists an engine's programs"),
    Name(
        "tpu_inference.runner.compilation_manager",
        "names the program that takes a list of pictures' embeddings",
        line="input_embeddings_merger",
    ),
    Name(
        "tpu_inference.distributed.jax_parallel_state:GroupCoordinator",
        "says which stage of a pipeline is compiled, as the module's global _PP",
    ),
    *_members(
        "vllm.distributed.parallel_state",
        ("init_distributed_environment", "ensure_model_parallel_initialized"),
        "sets up groups of one process",
    ),
    Name("vllm.config:set_current_vllm_config", "is the context in which a model is made"),
    Name("vllm.utils.torch_utils:set_default_torch_dtype", "is the type in which a model is made"),
    Name("vllm.ir:set_default_torch_wrap", "keeps vLLM from compiling with torch"),
    Name("vllm.v1.core.kv_cache_utils:get_kv_cache_configs", "sizes the cache as an engine does"),
)

NAMES: tuple[Name, ...] = (
    *_ENGINE,
    *_TEXTS,
    *_GRAMMARS,
    *_RESUME,
    *_STARTUP,
    *_TPU_INFERENCE,
    *_COMPILER,
    *_RAY,
)
