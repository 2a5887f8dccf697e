/** The API key: kept for this tab, or beyond it where its owner wants that; where the browser keeps nothing, by this page alone. */
import { keep, kept } from "../../ui/kept";

const NAME = "novainfer.key";

export interface KeyState {
  isGiven: boolean;
  isRemembered: boolean;
}

export class Keys {
  #key: string | null;
  #isRemembered: boolean;

  constructor() {
    const remembered = kept(NAME);
    this.#key = remembered ?? kept(NAME, true);
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
    this.#isRemembered = keep(NAME, key, !isRemembered) && isRemembered;
  }

  forget(): void {
    this.#key = null;
    this.#isRemembered = false;
    keep(NAME, null);
    keep(NAME, null, true);
  }
}
