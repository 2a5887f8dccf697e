/** What is open on the page and where the reader is; nothing of it is kept with the conversations. */
import { MediaQuery } from "svelte/reactivity";
import { keep, kept } from "../../ui/kept";
import type { Id } from "../model/types";

/** Below this width the sidebar lies over the conversation, below the second the settings do. */
const NARROW = "(max-width: 767px)";
const MEDIUM = "(max-width: 1099px)";
const SIDEBAR_KEY = "novainfer.sidebar";

export class Page {
  readonly narrow = new MediaQuery(NARROW);
  readonly medium = new MediaQuery(MEDIUM);
  #isSidebarWanted = $state(kept(SIDEBAR_KEY) !== "hidden");
  #isDrawerOpen = $state(false);
  isSettingsOpen = $state(false);
  isKeysOpen = $state(false);

  /** The question that is being edited; null: none. */
  editing = $state<Id | null>(null);

  /** Goes up with each wish to write in the message field, or to search: what has the field watches it. */
  composerWishes = $state(0);
  searchWishes = $state(0);

  get isSidebarOpen(): boolean {
    return this.narrow.current ? this.#isDrawerOpen : this.#isSidebarWanted;
  }

  showSidebar(isOpen: boolean): void {
    if (this.narrow.current) {
      this.#isDrawerOpen = isOpen;
      return;
    }
    this.#isSidebarWanted = isOpen;
    keep(SIDEBAR_KEY, isOpen ? "shown" : "hidden");
  }

  /** What lies over the conversation and keeps its controls from being reached. */
  get veil(): "sidebar" | "settings" | null {
    if (this.narrow.current && this.#isDrawerOpen) return "sidebar";
    return this.medium.current && this.isSettingsOpen ? "settings" : null;
  }

  liftVeil(): void {
    if (this.veil === "sidebar") this.#isDrawerOpen = false;
    else if (this.veil === "settings") this.isSettingsOpen = false;
  }

  write(): void {
    this.composerWishes += 1;
  }

  search(): void {
    this.showSidebar(true);
    this.searchWishes += 1;
  }
}
