/** The API key: kept for this tab, or beyond it where its owner wants that. */

const NAME = "novainfer.key";

export interface KeyState {
  isGiven: boolean;
  isRemembered: boolean;
}

export class Keys {
  #key: string | null;
  #isRemembered: boolean;

  constructor() {
    const remembered = tried(() => localStorage.getItem(NAME));
    this.#key = remembered ?? tried(() => sessionStorage.getItem(NAME));
    this.#isRemembered = remembered !== null;
  }

  get value(): string | null {
    return this.#key;
  }

  get state(): KeyState {
    return { isGiven: this.#key !== null, isRemembered: this.#isRemembered };
  }

  give(key: string, isRemembered: boolean): void {
    this.forget();
    this.#key = key;
    const isKept = tried(() => {
      (isRemembered ? localStorage : sessionStorage).setItem(NAME, key);
      return true;
    });
    this.#isRemembered = isRemembered && isKept === true;
  }

  forget(): void {
    this.#key = null;
    this.#isRemembered = false;
    tried(() => localStorage.removeItem(NAME));
    tried(() => sessionStorage.removeItem(NAME));
  }
}

/** Browsers that are told to keep nothing throw; the key is held by this page then, and no longer. */
function tried<T>(what: () => T): T | null {
  try {
    return what();
  } catch {
    return null;
  }
}
