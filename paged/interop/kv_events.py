"""KV events for routers, by the import path that pages name."""

from paged.serving.http.kv_events import KvEventPublisher as KvEventPublisher
