// The HTML that embeds one chart in another page.
import { get } from './api';
import { copy } from './copy';
import { view, write } from './view.svelte';

/** Return an iframe with the chart as currently shown. With a server, its URL has a token that can only read this project. */
export async function embedCode(metric: string, title: string, facet = ''): Promise<string> {
  const page = new URL(copy ? 'embed.html' : 'embed', location.href.split(/[?#]/)[0]);
  if (!copy) {
    const { share } = await get<{ share: string }>('api/share', { project: view.project });
    if (share) page.searchParams.set('share', share);
  }
  page.hash = write({ ...view, page: 'charts', key: metric, facet, pins: [], folded: [], tables: [], search: '', full: '' });
  return `<iframe src="${escape(page.href)}" title="${escape(title)}" width="720" height="420" style="border:0" loading="lazy"></iframe>`;
}
const escape = (text: string) => text.replace(/[&<>"']/g, (sign) => `&#${sign.charCodeAt(0)};`);
