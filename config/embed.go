// SPDX-License-Identifier: Apache-2.0

// Package config holds the manifests of this release. The manager compares with them what is installed.
package config

import "embed"

// Files are the manifests that the manager relies on: the definition, the policies and the webhook configuration.
//
//go:embed crd policy webhook
var Files embed.FS
