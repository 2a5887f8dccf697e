/** Light, dark, or as the system has it: chosen once for chat and inspector, and kept in this browser. */
import { keep, kept } from "./kept";

export const THEMES = ["system", "light", "dark"] as const;
export type Theme = (typeof THEMES)[number];

const KEY = "novainfer.theme";

function stored(): Theme {
  const value = kept(KEY);
  return THEMES.find((theme) => theme === value) ?? "system";
}

class ThemeChoice {
  #now = $state<Theme>(stored());

  constructor() {
    this.#show();
  }

  get now(): Theme {
    return this.#now;
  }

  set(theme: Theme): void {
    this.#now = theme;
    keep(KEY, theme);
    this.#show();
  }

  #show(): void {
    if (this.#now === "system") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = this.#now;
  }
}

export const theme = new ThemeChoice();
