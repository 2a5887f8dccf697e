/** The language of the page: the browser's where the page speaks it, else English; a choice is kept in this browser. */
import { keep, kept } from "../ui/kept";
import { en, type Messages } from "./en";
import { zh } from "./zh";

const LANGUAGES = { en, zh } satisfies Record<string, Messages>;
export type Language = keyof typeof LANGUAGES;
export const LANGUAGE_NAMES: Record<Language, string> = { en: "English", zh: "中文" };

const KEY = "novainfer.language";

function isLanguage(value: string | null): value is Language {
  return value !== null && value in LANGUAGES;
}

/** The first of the reader's languages that the page speaks. */
export function preferred(wanted: readonly string[]): Language {
  return wanted.map((tag) => tag.split("-")[0] ?? "").find(isLanguage) ?? "en";
}

function stored(): Language {
  const value = kept(KEY);
  return isLanguage(value) ? value : preferred(navigator.languages);
}

class I18n {
  #language = $state<Language>(stored());

  constructor() {
    this.#show();
  }

  get language(): Language {
    return this.#language;
  }

  /** What the page says, in the language of now. */
  get t(): Messages {
    return LANGUAGES[this.#language];
  }

  choose(language: Language): void {
    this.#language = language;
    keep(KEY, language);
    this.#show();
  }

  #show(): void {
    document.documentElement.lang = this.#language === "zh" ? "zh-Hans" : "en";
  }
}

export const i18n = new I18n();
