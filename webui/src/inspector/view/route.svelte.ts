/** Which view is shown: the part of the address behind the hash, so that a view can be linked to and the browser's back works. */
export const VIEWS = ["machines", "actors", "requests", "kv", "steps", "faults"] as const;
export type ViewName = (typeof VIEWS)[number];

class Route {
  view = $state<ViewName>("machines");
  /** The request that is open, in the view of requests. */
  request = $state<string | null>(null);

  constructor() {
    this.read();
  }

  read(): void {
    const [view = "", request = ""] = location.hash.slice(1).split("/");
    this.view = VIEWS.find((one) => one === view) ?? "machines";
    this.request = this.view === "requests" && request ? decodeURIComponent(request) : null;
  }

  show(view: ViewName): void {
    location.hash = view;
  }

  openRequest(id: string | null): void {
    location.hash = id === null ? "requests" : `requests/${encodeURIComponent(id)}`;
  }
}

export const route = new Route();
