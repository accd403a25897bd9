# The image of a Ray cluster on TPU hosts, head included: `ray start` comes from KubeRay or from you.
# Versions are those of pyproject.toml; a test holds them equal.
FROM python:3.12-slim

ARG RAY=2.60.0
ARG VLLM_TPU=0.26.0
ARG TPU_INFERENCE=0.26.0

# wget: KubeRay's probes. libnuma: vLLM asks for it at import.
RUN apt-get update \
 && apt-get install --yes --no-install-recommends wget libnuma1 \
 && rm -rf /var/lib/apt/lists/*

RUN pip install --no-cache-dir \
    "ray[serve]==${RAY}" "vllm-tpu==${VLLM_TPU}" "tpu-inference==${TPU_INFERENCE}"

WORKDIR /app
COPY pyproject.toml README.md ./
COPY serving serving
COPY deployments deployments
RUN pip install --no-cache-dir .

# A TPU host stages weights on its CPU devices: "tpu" alone would hide them.
# serving-haproxy: HAProxy without splicing, which overlooks clients that hang up (serving/router/haproxy.py).
ENV JAX_PLATFORMS=tpu,cpu \
    RAY_SERVE_HAPROXY_BINARY_PATH=/usr/local/bin/serving-haproxy \
    RAY_USAGE_STATS_ENABLED=0 \
    VLLM_NO_USAGE_STATS=1
