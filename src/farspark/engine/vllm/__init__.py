"""Where vLLM is met. The only room that imports it; nothing here is imported before the plugin is switched on."""
