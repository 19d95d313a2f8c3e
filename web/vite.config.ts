// Plain file names: the built page is committed, so a rebuild shows as a change of the same files, and the server's
// entity tags keep browsers up to date. All addresses are relative: the page works under any path of a proxy.
import { svelte } from '@sveltejs/vite-plugin-svelte';
import { defineConfig } from 'vitest/config';

export default defineConfig({
  plugins: [svelte()],
  test: { include: ['test/**/*.test.ts'] },
  base: './',
  build: {
    target: 'es2022',
    outDir: '../src/fanfold/server/static',
    emptyOutDir: true,
    modulePreload: { polyfill: false },
    assetsInlineLimit: 0,
    rollupOptions: {
      output: { entryFileNames: '[name].js', chunkFileNames: '[name].js', assetFileNames: '[name][extname]' },
    },
  },
  worker: { format: 'es', rollupOptions: { output: { entryFileNames: '[name].js' } } },
});
