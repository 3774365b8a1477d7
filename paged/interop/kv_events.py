"""KV events for routers, at the documented import path."""

from paged.serving.http.kv_events import KvEventPublisher as KvEventPublisher
