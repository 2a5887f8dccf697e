/** Which model's engine is watched: each has one of its own, so that of several one is chosen. The address keeps which. */
import { ask } from "./server.svelte";

interface ModelCard {
  id: string;
  status?: { value: string };
}

class Models {
  /** Those that the server has; empty until they are known. */
  names = $state.raw<string[]>([]);
  /** Null: the only one. */
  chosen = $state<string | null>(new URLSearchParams(location.search).get("model"));

  /** Ask for them; of several one that is loaded is chosen, where none is yet. Without an answer all stays as it is. */
  async look(): Promise<void> {
    const cards = await ask<{ data: ModelCard[] }>("v1/models").then(
      ({ data }) => data,
      () => [],
    );
    if (cards.length === 0) return;
    this.names = cards.map(({ id }) => id);
    const isThere = this.chosen !== null && this.names.includes(this.chosen);
    if (this.names.length < 2) this.chosen = null;
    else if (!isThere) this.chosen = (cards.find(({ status }) => status?.value === "loaded") ?? cards[0]!).id;
  }

  choose(name: string): void {
    this.chosen = name;
    const url = new URL(location.href);
    url.searchParams.set("model", name);
    history.replaceState(null, "", url);
  }

  /** `path` with the model that it is about, where there are several. */
  of(path: string): string {
    if (this.chosen === null) return path;
    return `${path}${path.includes("?") ? "&" : "?"}${new URLSearchParams({ model: this.chosen })}`;
  }
}

export const models = new Models();
