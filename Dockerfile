# Images for docker-compose.yml: the HTTP server and rq-dashboard. Neither holds MLX.

FROM python:3.12-slim AS base
ENV PIP_NO_CACHE_DIR=1 PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
RUN useradd --create-home --uid 10001 mlxrq && install -d -o mlxrq /data

FROM base AS server
WORKDIR /src
COPY . .
RUN pip install --constraint constraints.txt '.[http]' && rm -rf /src/*
WORKDIR /data
USER mlxrq
EXPOSE 8000
CMD ["mlx-rq", "serve"]

FROM base AS dashboard
RUN pip install 'rq-dashboard==0.9.0'
USER mlxrq
EXPOSE 9181
CMD ["rq-dashboard", "--json"]
