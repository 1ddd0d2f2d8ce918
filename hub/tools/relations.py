"""Which numbers of images go with the model being right about them: AUROC with bootstrap intervals.

    python hub/tools/relations.py out.json

The file is one that signals.py wrote: whether each image is classified correctly, and lists of numbers by name. Images
without a number (NaN) are left out. The AUROC is the probability that the number is larger for an image that is
classified correctly than for one that is not; where the interval contains 0.5, that is chance, there is no relation.
"""
import argparse
import json

import numpy as np
from scipy.stats import bootstrap
from sklearn.metrics import roc_auc_score


def relations(measures, correct, resamples=1000, level=0.95, seed=0):
    """For each measure, a list of numbers, its AUROC, the ends of the interval, and how many images have it."""
    rows = []
    for name, values in measures.items():
        values = np.asarray(values, float)
        there = ~np.isnan(values)
        right, score = np.asarray(correct, bool)[there], values[there]
        low, high = bootstrap((right, score), roc_auc_score, paired=True, vectorized=False, n_resamples=resamples,
                              confidence_level=level, method='percentile', rng=seed).confidence_interval
        rows.append({'name': name, 'auroc': float(roc_auc_score(right, score)), 'low': float(low), 'high': float(high),
                     'images': len(score), 'related': bool(low > 0.5 or high < 0.5)})
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('measures', help='JSON file')
    parser.add_argument('--resamples', type=int, default=1000)
    parser.add_argument('--level', type=float, default=0.95, help='probability of the interval')
    args = parser.parse_args()
    with open(args.measures) as file:
        measures = json.load(file)
    for row in relations(measures, measures.pop('correct'), args.resamples, args.level):
        none = '' if row['related'] else ', no relation'
        print('{name}: AUROC {auroc:.3f} [{low:.3f}, {high:.3f}] on {images} images'.format(**row) + none)


if __name__ == '__main__':
    main()
