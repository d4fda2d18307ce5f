"""Tables: files read as they are found in the wild, encoded with what the training split alone knows."""

from __future__ import annotations

import numpy as np
import pytest

from dataset import load
from sources import Encoder, Table, read_adult, read_csv, read_wine_quality
from utils import BadOption


def table(numbers: list[list[float]], categories: list[list[str]]) -> Table:
    return Table(np.array(numbers, np.float64), np.array(categories))


# ---------------------------------------------------------------- encoder


def test_encoder_by_hand():
    train = table([[1, 5], [3, 5], [np.nan, 5], [5, 5]], [["b"], ["a"], ["b"], [""]])
    encoder = Encoder.fit(train)
    spread = (8 / 3) ** 0.5  # of 1, 3, 5; the missing value does not count
    assert encoder.mean == [3, 5]
    np.testing.assert_allclose(encoder.std, [spread, 1])  # the constant column keeps its unit
    assert encoder.levels == [["", "a", "b"]]
    wanted = [[-2 / spread, 0, 0, 0, 1], [0, 0, 0, 1, 0], [0, 0, 0, 0, 1], [2 / spread, 0, 1, 0, 0]]
    found = encoder.encode(train)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, wanted, rtol=1e-7)

    test = table([[7, 6], [np.nan, np.nan]], [["a longer one, never seen"], ["a"]])
    np.testing.assert_allclose(encoder.encode(test), [[4 / spread, 1, 0, 0, 0], [0, 0, 0, 1, 0]], rtol=1e-7)


def test_encoder_survives_json():
    encoder = Encoder.fit(table([[1 / 3], [2 / 7]], [["x"], ["y"]]))
    assert Encoder.from_json(encoder.to_json()) == encoder


@pytest.mark.parametrize("constant", [0.0, 0.1, 1 / 3, 1e8 + 0.1, 1e-20])
def test_a_constant_column_stays_zero(constant):
    """Rounding gives 0.1 seven times a standard deviation of 1e-17; divided by that, noise would become a feature."""
    rows = Table.of(np.full((7, 1), constant))
    encoder = Encoder.fit(rows)
    assert encoder.std == [1.0]
    assert np.abs(encoder.encode(rows)).max() <= 1e-15 * max(constant, 1)


def test_a_column_that_is_missing_everywhere_stays_zero():
    rows = table([[np.nan, 1], [np.nan, 3]], [["a"], ["a"]])
    assert Encoder.fit(rows).encode(rows).tolist() == [[0, -1, 1], [0, 1, 1]]


def test_rows_with_other_columns_are_refused():
    encoder = Encoder.fit(table([[1, 2]], [["a"]]))
    rule = "^dataset must have the columns that the model was trained on, 2 of numbers and 1 of categories, not 3 and 0"
    with pytest.raises(BadOption, match=rule):
        encoder.encode(Table.of(np.zeros((2, 3))))
    with pytest.raises(BadOption, match=r"^dataset has the rows of a table, and the model reads images"):
        Encoder.from_json({"mean": [0.5], "std": [0.2]})


def test_labels_below_0_are_classes_and_said(tmp_path, capsys):
    x, y = np.random.default_rng(0).normal(size=(30, 2)), np.arange(30) % 5 - 1
    np.savez(tmp_path / "d.npz", x_train=x, y_train=y, x_test=x, y_test=np.abs(y))
    assert load(f"npz:{tmp_path / 'd.npz'}").classes == ("-1", "0", "1", "2", "3")
    said = capsys.readouterr().err
    assert "dataset: y_train has labels from -1; every value is a class of its own, -1 too" in said
    assert "y_test" not in said


def test_indexing_a_table_keeps_rows_together():
    rows = table([[1], [2], [3]], [["a"], ["b"], ["c"]])[np.array([2, 0])]
    assert (rows.numbers.tolist(), rows.categories.tolist(), len(rows)) == ([[3], [1]], [["c"], ["a"]], 2)


# ---------------------------------------------------------------- CSV

TEXT = """width,color,height,kind
1.5,red,,yes
2e1,"blue, dark",3,no
?,red,-4,yes
,na,5.0,no
"""


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_csv(delimiter, tmp_path):
    file = tmp_path / "a.csv"
    file.write_text(TEXT.replace('"blue, dark"', "BLUE").replace(",", delimiter).replace("BLUE", '"blue, dark"'))
    rows, labels = read_csv(file, "kind")
    np.testing.assert_array_equal(rows.numbers, [[1.5, np.nan], [20, 3], [np.nan, -4], [np.nan, 5]])
    assert rows.categories.tolist() == [["red"], ["blue, dark"], ["red"], [""]]
    assert labels.tolist() == ["yes", "no", "yes", "no"]


def test_csv_as_spreadsheets_write_it(tmp_path):
    file = tmp_path / "a.csv"
    file.write_bytes('\ufeffa; y\r\n\r\n1 ; "é"\r\n2; b\r\n\r\n'.encode())  # a byte order mark, blank lines, blanks around values
    rows, labels = read_csv(file, "y")
    assert rows.numbers.tolist() == [[1], [2]]
    assert labels.tolist() == ["é", "b"]
    assert read_csv(file, "a")[1].tolist() == ["1", "2"]  # any column may be the target


def test_two_columns_of_one_name_are_two_columns(tmp_path):
    file = tmp_path / "a.csv"
    file.write_text("a,a,y,a\n1,2,p,x\n3,4,q,z\n")
    rows, labels = read_csv(file, "y")
    assert rows.numbers.tolist() == [[1, 2], [3, 4]]
    assert rows.categories.tolist() == [["x"], ["z"]]
    assert labels.tolist() == ["p", "q"]


def test_csv_as_a_data_set(tmp_path):
    """Numbers, categories and labels stay with their rows; means come from the training split."""
    file = tmp_path / "odd:name.csv"
    lines = [f"{n},{'uvw'[n % 3]},{'pq'[n % 2]}" for n in range(101)]
    file.write_text("n,letter,y\n" + "\n".join(lines) + "\n")
    data = load(f"csv:{file}:y", val_fraction=0.2)
    assert (data.kind, data.shape, data.classes) == ("table", (4,), ("p", "q"))
    assert data.val is not None
    (mean,), (std,) = data.fitted["mean"], data.fitted["std"]
    seen = []
    for split in (data.train, data.val, data.test):
        numbers = np.rint(split.x[:, 0] * std + mean).astype(int)
        assert split.y.tolist() == (numbers % 2).tolist()
        assert split.x[:, 1:].argmax(1).tolist() == (numbers % 3).tolist()
        seen.append(numbers.tolist())
    assert sorted(n for numbers in seen for n in numbers) == list(range(101))
    np.testing.assert_allclose(mean, np.mean(seen[0]), rtol=1e-12)
    np.testing.assert_allclose(std, np.std(seen[0]), rtol=1e-12)


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("a,b\n1,2\n", r"has no column 'y'; it has a, b, got"),
        ("a,Y2\n1,2\n", r"has no column 'y' \(did you mean 'Y2'\?\); it has a, Y2"),
        ("a,y\n", "must be a CSV file with a header and rows"),
        ("", "must be a CSV file with a header and rows"),
        ("a,y\n1,2\n1\n", "has 2 columns, and 1 in line 3"),
        ("a,y\n1,2,3\n", "has 2 columns, and 3 in line 2"),
        ("y\n1\n2\n", "must have columns besides 'y'"),
        ("a,y\n1,p\n2,\n", "has rows without a 'y'"),
        ("a,y\n1,p\n2,?\n", "has rows without a 'y'"),
        ('a,y\n"' + "x" * 140_000 + "\n1,2\n", r"must be a CSV file \(field larger than field limit"),
    ],
)
def test_a_wrong_csv(text, rule, tmp_path):
    file = tmp_path / "a.csv"
    file.write_text(text)
    with pytest.raises(BadOption, match=f"^dataset {rule}"):
        load(f"csv:{file}:y")


def test_a_csv_that_can_not_be_read(tmp_path):
    file = tmp_path / "a.csv"
    with pytest.raises(BadOption, match=r"^dataset must be a file that can be read \(No such file or directory\), got '.*a.csv'"):
        load(f"csv:{file}:y")
    file.write_bytes(b"a,y\n\xff\xfe,1\n")
    with pytest.raises(BadOption, match=r"^dataset must be a file that can be read \(not UTF-8 text\)"):
        load(f"csv:{file}:y")


def test_a_target_of_measures_leaves_nothing_to_test(tmp_path):
    """Each value is a class of its own, and a class keeps a row for training."""
    file = tmp_path / "a.csv"
    file.write_text("a,y\n" + "".join(f"{n},{n / 7}\n" for n in range(23)))
    with pytest.raises(BadOption, match=r"^dataset must leave at least 1 test row after the splits \(0 left\)"):
        load(f"csv:{file}:y")


# ---------------------------------------------------------------- UCI files

ADULT = (
    "39, State-gov, 77516, Bachelors, 13, Never-married, Adm-clerical, Not-in-family, White, Male, 2174, 0, 40, United-States, {}\n"
    "50, ?, 83311, HS-grad, 9, Divorced, ?, Husband, Black, Female, 0, 1887, 13, ?, {}\n"
)


@pytest.mark.parametrize("folder", [".", "adult"])
def test_adult(folder, tmp_path):
    (tmp_path / folder).mkdir(exist_ok=True)
    (tmp_path / folder / "adult.data").write_text(ADULT.format("<=50K", ">50K") * 2 + "\n")
    (tmp_path / folder / "adult.test").write_text("|1x3 Cross validator\n" + ADULT.format(">50K.", "<=50K.") + "\n")
    read = read_adult(tmp_path)
    assert len(read) == 4
    train, y_train, test, y_test = read
    assert train.numbers.tolist() == [[39, 77516, 13, 2174, 0, 40], [50, 83311, 9, 0, 1887, 13]] * 2
    assert train.categories[1].tolist() == ["", "HS-grad", "Divorced", "", "Husband", "Black", "Female", ""]
    assert y_train.tolist() == ["<=50K", ">50K"] * 2
    assert y_test.tolist() == [">50K", "<=50K"]
    assert test.numbers.tolist() == train.numbers[:2].tolist()

    data = load("adult", str(tmp_path), val_fraction=0)
    assert (data.shape, data.classes, len(data.train), len(data.test)) == ((6 + 8 * 2,), ("<=50K", ">50K"), 4, 2)
    assert data.test.y.tolist() == [1, 0]


def test_an_adult_file_cut_short_is_named(tmp_path):
    (tmp_path / "adult.data").write_text(ADULT.format("<=50K", ">50K")[:-40])
    (tmp_path / "adult.test").write_text(ADULT.format("<=50K.", ">50K."))
    with pytest.raises(BadOption, match=r"^data_path must hold the UCI file adult.data with 15 columns, got '.*adult.data'"):
        load("adult", str(tmp_path))
    (tmp_path / "adult.data").write_text("")
    with pytest.raises(BadOption, match=r"^dataset must leave at least 2 training rows"):
        load("adult", str(tmp_path))


MEASURES = [
    "fixed acidity", "volatile acidity", "citric acid", "residual sugar", "chlorides", "free sulfur dioxide",
    "total sulfur dioxide", "density", "pH", "sulphates", "alcohol", "quality",
]  # fmt: skip


@pytest.mark.parametrize("folder", [".", "wine-quality"])
def test_wine_quality(folder, tmp_path):
    (tmp_path / folder).mkdir(exist_ok=True)
    for color, rows, base in (("red", 3, 0.0), ("white", 5, 100.0)):
        lines = [";".join(f'"{m}"' for m in MEASURES)]
        lines += [";".join(str(base + row + column / 16) for column in range(11)) + f";{3 + row}" for row in range(rows)]
        (tmp_path / folder / f"winequality-{color}.csv").write_text("\n".join(lines) + "\n")
    rows_, labels = read_wine_quality(tmp_path)
    assert rows_.categories[:, 0].tolist() == ["red"] * 3 + ["white"] * 5
    assert rows_.numbers[4].tolist() == [101 + column / 16 for column in range(11)]
    assert labels.tolist() == ["3", "4", "5", "3", "4", "5", "6", "7"]
