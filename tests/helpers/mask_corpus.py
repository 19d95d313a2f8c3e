"""Secrets and harmless values as found in configs, command lines, text and logs; `test_mask.py` runs all of them through the mask.

No secret here was ever valid. Each is written in two parts, so that repository scanners do not report it.
"""

from __future__ import annotations

_R = "q7Xk2Vb9Tn4Lm8Rc1Zd6Wf3Hs5Jg0PyKe"  # random letters and digits
_HEX = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b"
_UUID = "0f8b2c1e-3d4a-4b5c-9e6f-7a8b9c0d1e2f"


def _jwt() -> str:
    return ".".join(("eyJhbGciOiJIUzI1NiJ9", "eyJzdWIiOiIxMjM0NTY3ODkwIn0", "dozjgNryP4J3jVmNHl0w5N_XgL0n3I9"))


# Tokens with a documented format: masked in any text, under any name.
SHAPED = [
    "hf_" + _R, "api_org_" + _R, "sk-" + _R, "sk-proj-" + _R, "sk-ant-api03-" + _R, "sk-or-v1-" + _R, "sk-svcacct-" + _R, "sk-lf-" + _R,
    "sk_live_" + _R, "sk_test_" + _R, "rk_live_" + _R, "rk_test_" + _R, "whsec_" + _R,
    "ghp_" + _R, "gho_" + _R, "ghu_" + _R, "ghs_" + _R, "ghr_" + _R, "github_pat_" + _R,
    "glpat-" + _R, "gldt-" + _R, "glrt-" + _R, "glptt-" + _R, "glft-" + _R, "glcbt-" + _R, "glsoat-" + _R,
    "AKIA" + "IOSFODNN7EXAMPLE", "ASIA" + "IOSFODNN7EXAMPLE", "AIza" + "SyD-9tSrke72PouQMnMX-a7eZSW0jkFMBWY",
    "ya29." + _R, "GOCSPX-" + _R, "LTAI" + "5tQ7Xk2Vb9Tn4Lm8Rc", "AKID" + _R[:32],
    "xoxb-" + "123456789012-1234567890123-" + _R, "xoxp-" + "1234-" + _R, "xoxe.xoxp-1-" + _R, "xapp-1-" + "A0123-" + _R,
    "hooks.slack.com/services/" + "T0001/B0001/" + _R, "discord.com/api/webhooks/" + "123456/" + _R, "webhook.office.com/" + "webhookb2/" + _R,
    _jwt(), "eyJhcGlfYWRkcmVzcyI6" + "Imh0dHBzOi8vYXBwLm5lcHR1bmUuYWkiLCJhcGlfa2V5IjoiMTIzIn0=",
    "wandb_v1_" + _R, "local-" + _HEX, "nvapi-" + _R, "gsk_" + _R, "r8_" + _R, "pplx-" + _R, "xai-" + _R, "tgp_v1_" + _R, "fw_" + _R,
    "pcsk_" + _R, "lsv2_pt_" + _R, "lsv2_sk_" + _R, "tvly-" + _R, "jina_" + _R, "rpa_" + _R.upper(), "npm_" + _R, "pypi-AgEIcHlwaS5vcmc" + _R,
    "rubygems_" + _HEX, "dckr_pat_" + _R, "dapi" + _HEX[:32], "dop_v1_" + _HEX, "hvs." + _R, "shpat_" + _HEX[:32],
    "SG." + _R[:22] + "." + _R, "lin_api_" + _R, "ntn_" + _R, "figd_" + _R, "dp.pt." + _R, "sntrys_" + _R, "sntryu_" + _HEX, "glsa_" + _R,
    "glc_" + _R, "NRAK-" + _R.upper(), "phx_" + _R, "ATATT3" + _R + _R, "ATBB" + _R, "sgp_" + _HEX, "pul-" + _HEX, "sbp_" + _HEX,
    "tskey-auth-" + _R, "AGE-SECRET-KEY-1" + (_R + _R).upper(), "a1b8Q~" + _R, "123456789:AA" + _R[:33], "123456789:" + "AAHdqTcvCH1vGWJxfSeofSAs0K5PALDsaw",
    "MTIzNDU2Nzg5MDEyMzQ1Njc4" + ".GabcDE.0123456789abcdefghijklmnopqrstuvwxyzAB", "MTIzNDU2Nzg5MDEyMzQ1Njc4OQ" + ".GabcDE." + _R[:27],
    "ffk_0a1b2c3d_" + _R,
    "HRKU-" + _UUID, "v1.0-" + _HEX[:24] + "-" + _HEX * 3, "key-" + _HEX[:32], _HEX[:32] + "-us12", "EAAA" + _R + _R,
    "SK" + _HEX[:32], "EZAK" + _R + _R[:20], "patq7Xk2Vb9Tn4Lm8." + _HEX + _HEX[:24],
    "dt0c01." + _R[:24].upper() + "." + (_R + _R)[:64].upper(), "rdme_" + _HEX + _HEX[:30], "sk_" + _HEX + _HEX[:8],
    "ls__" + _HEX[:32], "amzn.mws." + _UUID, "xkeysib-" + _HEX + _HEX[:24] + "-" + _R[:16], "EAACEdEose0cBA" + _R, "1//0" + _R,
    "bkua_" + _HEX, "re_" + _R[:8] + "_" + _R[:24], "access-sandbox-" + _UUID, "ATCTT3xFfGN0" + _R + _R, "ops_eyJ" + _R * 2,
    "snyk_" + _UUID, "sdk-" + _UUID, "squ_" + _HEX, "sqp_" + _HEX, "AKCp8" + _R + _R, "cmVmdGtuO" + _R,
]  # fmt: skip

# Tokens of unknown vendors: a prefix of words, followed by random characters.
DRAWN = [
    "vercel_blob_rw_" + _R, "fo1_" + _R, "FlyV1 fm2_" + _R + _R, "rnd_" + _R, "nfp_" + _R, "sq0atp-" + _R[:22],
    "pscale_tkn_" + _R, "q7Xk2Vb9Tn4Lm8.atlasv1." + _R + _R, "dp.st.dev." + _R, "pnu_" + _R, "CFPAT-" + _R, "db-" + _R,
    "pa-" + _R, "ak-" + _R[:22], "esecret_" + _R, "secret_" + _R, "CCIPAT_" + _R[:22] + "_" + _HEX, "sb_secret_" + _R,
    "napi_" + _R, "hf_oauth_" + _R, "tfp_" + _R, "fio-u-" + _R, "aio_" + _R[:28], "dhp_" + _R, "neverheardof_" + _R,
    "NEWVENDOR-" + _R,
]  # fmt: skip

# Names, and values that are secrets because of the name.
NAMED = [
    ("password", "hunter2"), ("password", "letmein"), ("Password", "correct horse battery"), ("db_password", "x"), ("PGPASSWORD", "pg"),
    ("MYSQL_PWD", "abc"), ("pwd", "qwe123!"), ("db.pwd", "letmein"), ("PWD", "qwe123!"), ("smtp_pass", "abc"), ("passphrase", "open sesame"), ("client_secret", "shh"), ("AWS_SECRET_ACCESS_KEY", "wJalr/EX"),
    ("aws_access_key_id", "abc"), ("api_key", "abc"), ("apiKey", "abc"), ("OPENAI_API_KEY", "abc"), ("wandb_api_key", _HEX),
    ("WANDB_KEY", _HEX), ("wandb", _HEX), ("COMET_API_KEY", _R[:25]), ("NEPTUNE_API_TOKEN", "abc"), ("HF_TOKEN", "abc"), ("hub_token", "abc"),
    ("access_token", "abc"), ("refresh_token", "abc"), ("GITHUB_TOKEN", "abc"), ("MY_TOKEN", "abc"), ("token", _R), ("login.token", "a1b2c3d4"),
    ("Authorization", "Basic dXNlcjpw"), ("bearer", "abc"), ("cookie", "session=1"), ("private_key", "abc"), ("ssh_key", "abc"),
    ("encryption_key", "abc"), ("signing_key", "abc"), ("license_key", _R), ("master_key", _R), ("openai_key", _R), ("session_key", _HEX),
    ("auth", "user:hunter2"), ("pass", "xK92jd8s"), ("password_hash", _R), ("credentials", "user and password"), ("X-Api-Key", "abc"),
]  # fmt: skip

# Texts, and the part that must be masked.
TEXTS = [
    ("postgres://me:hunter2@db/x", "hunter2"), ("https://user:pa$$word@proxy:3128", "pa$$word"), ("redis://:s3cret@cache:6379/0", "s3cret"),
    ("machine api.wandb.ai\n  login user\n  password " + _HEX, _HEX), ("machine h login u password hunter2", "hunter2"),
    ("curl -u me:hunter2 https://h", "hunter2"), ("curl --user me:hunter2 https://h", "hunter2"), ("http --auth me:hunter2 GET h", "hunter2"),
    ("mysql --pw hunter2 db", "hunter2"), ("tool --pass hunter2", "hunter2"), ("tool --pass=hunter2", "hunter2"), ("t --password hunter2", "hunter2"),
    ("t --token=abc", "abc"), ("Authorization: Bearer " + _R, _R), ("authorization: token " + _R, _R), ("https://h/x?access_token=abc1", "abc1"),
    ("https://maps/api?key=abc1", "abc1"), ("https://h/b?X-Amz-Signature=0a1b2c", "0a1b2c"), ("https://acc.blob/x?sv=1&sig=a%2Fb", "a%2Fb"),
    ("DefaultEndpointsProtocol=https;AccountName=a;AccountKey=abc==;", "abc=="), ("wandb.login(key='" + _HEX + "')", _HEX),
    ("wandb: Appending key for api.wandb.ai: " + _HEX, _HEX), ('{"password": "hunter2"}', "hunter2"), ("password=hunter2", "hunter2"),
    ("-----BEGIN OPENSSH PRIVATE KEY-----\nb3Blbn\n-----END OPENSSH PRIVATE KEY-----", "b3Blbn"), ("export HF_TOKEN=abc", "abc"),
    ("ValueError: bad api_key 'x', api_key='abc1'", "abc1"), ("password: hunter2", "hunter2"), ('pwd: "qwe123!"', "qwe123!"),
    ("Server=db;Uid=sa;Pwd=hunter2;", "hunter2"), ("https://api.telegram.org/bot123456789:AA" + _R[:33] + "/getMe", _R[:33]), ("os.environ['API_KEY'] = 'abc1'", "abc1"),
]  # fmt: skip

ARGUMENTS = [
    (["--pass", "hunter2"], "hunter2"), (["--pw", "hunter2"], "hunter2"), (["--pass=hunter2"], "hunter2"), (["--auth", "me:hunter2"], "hunter2"),
    (["-u", "me:hunter2"], "hunter2"), (["--token", "abc"], "abc"), (["--api-key=abc"], "abc"), (["--hub-token", "abc"], "abc"),
    (["WANDB_API_KEY=abc"], "abc"), (["--db.password=hunter2"], "hunter2"), (["--secret", "hunter2"], "hunter2"),
]  # fmt: skip

# Values of real configs that must not be masked.
HARMLESS = [
    ("text_key", "text"), ("label_key", "label"), ("monitor_key", "val/loss"), ("fim_token", "<|fim|>"), ("end_token", "</s>"),
    ("image_key", "jpg"), ("caption_key", "txt"), ("key", "loss"), ("keys", ["a", "b"]), ("sort_key", "date"), ("cache_key", "v3-train"),
    ("primary_key", "id"), ("foreign_key", "user_id"), ("public_key", "ssh-ed25519 AAAA"), ("group_key", "fold_1"), ("index_key", "idx0"),
    ("join_key", "user_id"), ("partition_key", "2024-05-13"), ("metric_key", "eval/acc@5"), ("query_key_value", "fused"), ("key_dim", "64"),
    ("num_key_value_heads", 8), ("key_size", 128), ("attention.key", "q_proj"), ("hotkey", "ctrl+k"), ("monkey", "patch"), ("keyboard", "qwerty"),
    ("prompt_key", "question"), ("answer_key", "answer"), ("input_key", "input_ids"), ("output_key", "logits"), ("target_key", "y1"),
    ("early_stopping_key", "val/f1"), ("feature_key", "mel80"), ("id_key", "uid"), ("meta_key", "meta_v2"), ("lmdb_key", "00000001"),
    ("wds_key", "__key__"), ("s3_key", "data/train.tar"), ("object_key", "ckpt/step_1000.pt"), ("redis_key", "queue:1"), ("shard_key", "shard-00001"),
    ("pad_token", "<pad>"), ("bos_token", "<s>"), ("eos_token", "</s>"), ("unk_token", "[UNK]"), ("sep_token", "[SEP]"), ("cls_token", "[CLS]"),
    ("mask_token", "[MASK]"), ("pad_token", "<|reserved_special_token_0|>"), ("eos_token", "<|im_end|>"), ("stop_token", "END_OF_TURN_2"),
    ("start_token", "t5-small1"), ("image_token", "<image>"), ("image_token", "image0"), ("video_token", "<video>"), ("audio_token", "<audio>"),
    ("fim_prefix_token", "<PRE>"), ("fim_suffix_token", "<SUF>"), ("fim_middle_token", "<MID>"), ("system_token", "<|system|>"),
    ("user_token", "<|user|>"), ("assistant_token", "<|assistant|>"), ("think_token", "<think>"), ("tool_token", "<tool_call>"),
    ("newline_token", "\\n"), ("next_token", "hello"), ("token", "word"), ("token", "the"), ("token", "<|endoftext|>"), ("class_token", True),
    ("decoder_start_token_id", 0), ("pad_token_id", 50256), ("eos_token_id", [1, 2]), ("token_type", "bpe"), ("token_dropout", 0.1),
    ("token_embedding", "learned"), ("tokenizer", "meta-llama/Llama-3-8B"), ("tokenizer_name", "bert-base-uncased"), ("tokens", 3_000_000),
    ("max_tokens", 4096), ("num_tokens", "1T"), ("tokens_per_second", 1234.5), ("max_new_tokens", 128), ("special_tokens", ["<a>", "<b>"]),
    ("additional_special_tokens", ["<extra_id_0>", "<extra_id_1>"]), ("token_count", 12), ("eval_token", 4096), ("use_auth_token", True),
    ("hub_token", None), ("hub_token", ""), ("api_key", None), ("api_key", ""), ("api_key", "${API_KEY}"), ("api_key", "$OPENAI_API_KEY"),
    ("api_key", "<your key>"), ("password", "{{ db_password }}"), ("password", "none"), ("password", "prompt"), ("use_password", False),
    ("hub_token", "<HUB_TOKEN>"), ("credentials", "/etc/gcp/key.json"), ("ssh_key", "~/.ssh/id_ed25519"), ("private_key", "./server.pem"),
    ("credentials_file", "gcp.json"), ("password_field", "password"), ("password_min_length", 8), ("secret_size", 5), ("secret_name", "my-secret"),
    ("author", "Ada"), ("authors", ["Ada", "Grace"]), ("auth", "basic"), ("auth", "none"), ("auth_mode", "oauth2"), ("pass", 2),
    ("backward_pass", "fused"), ("forward_pass", "eager"), ("passes", 3), ("num_passes", 2), ("bypass", "residual"), ("compass", "north"),
    ("PWD", "/home/me/project"), ("pwd", "/home/me/project"), ("pwd", "/home/me/run+1 (b)"), ("PWD", "C:\\Users\\me\\run+1"), ("text", "pwd: /data/run+1"),
    ("file", "MobileNetV3LargeQuantized.onnx16.0123456789abcdefghijklmnopq"), ("cookiecutter", "template"), ("secretary", "desk"), ("tokenise", True),
    ("lr", 3e-4), ("seed", 42), ("model", "resnet50"), ("model_name_or_path", "meta-llama/Llama-3.1-8B-Instruct"), ("revision", _HEX),
    ("commit", _HEX), ("sha256", _HEX + _HEX[:24]), ("md5", _HEX[:32]), ("checkpoint", "outputs/2024-05-13/12-34-56/last.ckpt"),
    ("dataset", "allenai/c4"), ("data_files", "s3://bucket/train-*.parquet"), ("url", "https://huggingface.co/gpt2/resolve/main/model.safetensors"),
    ("wandb_project", "llm"), ("wandb_entity", "team1"), ("run_id", "8f14e45fceea167a"), ("uuid", "123e4567-e89b-12d3-a456-426614174000"),
    ("run_name", "sk-learn-random-forest-baseline"), ("name", "task-abcdefgh12345678abcdefgh"), ("job", "npm_config"), ("host", "localhost:8080"),
    ("tracking_uri", "http://mlflow:5000"), ("address", "tcp://10.0.0.1:29500"), ("init_method", "env://"), ("master_addr", "node-001"),
    ("image", "registry.io/team/train:1.2.3@sha256:" + _HEX), ("email", "ada@example.org"), ("version", "2.3.1+cu121"), ("device", "cuda:0"),
    ("optimizer", {"name": "adamw", "betas": [0.9, 0.95]}), ("layers", [64, 128, 256]), ("dtype", "bfloat16"), ("precision", "16-mixed"),
    ("activation", "gelu_new"), ("scheduler", "cosine_with_restarts"), ("prompt", "Translate the token: hello"), ("note", "the secret is in the sauce"),
    ("description", "password manager dataset, 10k tokens"), ("notes", "Bearer of good news"), ("task", "keyphrase_extraction"),
    ("metric", "token_accuracy"), ("loss", "token_mean"), ("reduction", "per_token"), ("padding", "max_length"), ("template", "chatml"),
    ("text", "key: value"), ("text", "token: hello"), ("text", "token ids 5 6 7"), ("text", "tokens/s=1234.5"), ("text", "step 10 token 99 loss 1.5"),
    ("text", "pad_token='<pad>', eos_token='</s>'"), ("text", "key='loss', mode='min'"), ("text", "docker run -u 1000:1000 img"),
    ("text", "see http://localhost:8080/a@b"), ("text", "git@github.com:me/repo.git"), ("text", "ssh://git@host/repo"), ("text", "12:AA"),
    ("text", "sk-learn 1.5"), ("text", "hf_hub_download"), ("text", "hf_transfer"), ("text", "gsk_model"), ("text", "npm_lifecycle_event"),
    ("text", "pypi-server"), ("text", "local-attention"), ("text", "fw_bw_time"), ("text", "pul-back"), ("text", "SG.step"), ("text", "AKIA"),
    ("text", "eyJ"), ("text", "ghp_"), ("text", "ya29."), ("text", "dapi"), ("text", "xai-explain"), ("text", "jina_embeddings"), ("text", "glc_loss"),
    ("text", "max_tokens=4096 api_key=None token=12"), ("text", "BEGIN PUBLIC KEY"), ("text", "password is required"), ("text", "no password given"),
    ("text", "machine learning with login nodes"), ("text", "--tokenizer gpt2 --end-token end"), ("text", "--max-tokens 5 --text-key text"),
    ("group", "sweep-2024-05-13"), ("tags", ["baseline", "v2", "fp16"]), ("layer_key", "layers.0.attn.k_proj"), ("state_key", "ema_0.999"),
    ("cls_pooling", "first_token"), ("data_key", "pixel_values"), ("rng_key", 0), ("key_padding_mask", "causal"), ("keystroke", "a1b2"),
    ("subject_token", "sks"), ("placeholder_token", "<cat-toy>"), ("initializer_token", "toy"), ("instance_token", "zwx dog"),
    ("key_frames", "0,10,20"), ("secret_santa", True), ("dataset_key", "train"), ("deepspeed", "ds_config_zero3.json"), ("api_type", "open_ai"),
    ("fsdp_transformer_layer_cls_to_wrap", "LlamaDecoderLayer"), ("lora_target_modules", "q_proj,k_proj,v_proj,o_proj"),
    ("chat_template", "{% for message in messages %}{{ message['content'] }}{% endfor %}"), ("image_token_index", 32000), ("api_version", "2024-02-15-preview"),
    ("token_merging", "tome"), ("cookie_cutter", "v2"), ("key_value_heads", "8"), ("kv_cache_dtype", "fp8_e4m3"), ("api_base", "https://api.openai.com/v1"),
    ("hub_model_id", "me/my-model"), ("hub_strategy", "every_save"), ("wandb_run_id", "3k2j9d8f"), ("neptune_run", "LLM-123"),
    ("checkpoint", "/data/ckpt/step_00010000-abcdef0123456789.pt"), ("etag", 'W/"33a64df551425fcc55e4d42a148795d9f25f89d4"'),
    ("layer", "model.layers.0.self_attn.q_proj.weight"), ("regex", r"^(?!.*(lm_head|embed)).*$"), ("args", "--key-dim 64 --token-limit 4096 --pass-through"),
    ("container", "nvcr.io/nvidia/pytorch:24.05-py3"), ("digest", "sha256:" + _HEX + _HEX[:24]), ("seed_str", "0x9f86d081884c7d65"), ("pin_memory", True),
    ("secret_dim", 64), ("keyword", "attention"), ("attn_implementation", "flash_attention_2"), ("estimator", "sk-LogisticRegressionCVWithPipeline"),
    ("task", "key-value-retrieval-with-long-context-128k"), ("exp", "pa-baseline-large-batch-cosine-warmup"), ("exp", "re_train_with_augmentation_v2_large"),
    ("exp", "us_english_speech_commands_v2_dataset"), ("exp", "as-built-baseline-2024-transformer"), ("exp", "db-lookup-benchmark-large-scale-eval"),
    ("exp", "fo1_ablation_no_dropout_large_model_v3"), ("exp", "npm_package_classifier_bert_base_uncased"), ("exp", "gsk_chemistry_transformer_large_uncased"),
    ("exp", "fw_edu_sample_100BT_deduplicated_v1_5"), ("exp", "xai-explanations-integrated-gradients-v2"), ("exp", "r8_resnet_cifar100_augmented_baseline_1"),
    ("exp", "glc_landcover_2020_sentinel2_tiles_v3"), ("exp", "jina_embeddings_v3_base_multilingual_x"), ("exp", "local-attention-window-4096-rope-theta"),
    ("exp", "sk-proj-up-down-gate-mlp-variant-large"), ("model", "timm-ResNet50V2ImageNet1kPretrained224"), ("model", "keras_EfficientNetV2B3ImageNet21kFinetuned"),
    ("model", "vit_base_patch16_224_augreg_in21k_ft_in1k"), ("file", "models--BAAI--bge-M3Embedding1024DimMultilingual"), ("run", "run-20240513_123456-3k2j9d8f"),
    ("integrity", "sha512-q7Xk2Vb9Tn4Lm8Rc1Zd6Wf3Hs5Jg0PyKe=="), ("drive_id", "1BxiMVs0XRA5nFMdKvBdBZjgmUUqptlbs74OgvE2upms"), ("run", "llm-" + _HEX), ("id", "job-" + _UUID),
    ("artifact", "run-8f14e45fceea167a5a36dedd4bea2543-history:v0"), ("snapshot", "snapshots/" + _HEX + "/model-00001-of-00004.safetensors"),
    ("class", "my_pkg.TransformerEncoderLayerWithRoPE2D"), ("config", "T5ForConditionalGeneration-V1dot1XXL"),
]  # fmt: skip
